// The schedule `auto`: an order that is made for the costs and the memory at hand, by the same rules as in
// pipeline/schedule/search.py. A problem is {stages, edges, slowdown, device_of_stage, micro_batches, sizes, room,
// recompute, split}: as simulate takes them, the bytes of a micro-batch of each stage, and what there is room for (or null).

const AS_GOOD = 1.001; // of two orders as fast as each other the first, which is simpler
const MOST_TRIED = 500000; // actions in all
const searches = new Map();

/** The fastest order that fits, {name, rows, seconds}, or null; and all that were tried. */
function auto(problem) {
  if (searches.size > 50) searches.clear();
  return once(searches, JSON.stringify(problem), () => {
    const tried = [], known = new Set();
    for (const [name, rows] of candidates(problem)) {
      const text = rows.map((row) => row.map(key)).join("|");
      if (known.has(text)) continue;
      known.add(text);
      tried.push(tryOrder(problem, name, rows));
      if (tried.length * sum(rows.map((row) => row.length)) > MOST_TRIED) break;
    }
    const seconds = (one) => one.seconds === null ? Infinity : one.seconds;
    const least = -greatest(tried.map((one) => -seconds(one)));
    return {best: tried.find((one) => one.seconds !== null && one.seconds <= least * AS_GOOD) || null, tried};
  });
}

function* candidates(problem) {
  const {device_of_stage, micro_batches: M, split, recompute, room} = problem;
  const K = problem.stages.length, devices = 1 + greatest(device_of_stage);
  yield ["1f1b", order("1f1b", K, M)];
  if (split) yield ["zero_bubble", order("zero_bubble", K, M)];
  if (1 < devices && devices < K && K % devices === 0 && device_of_stage.every((device, k) => device === k % devices)) {
    yield ["interleaved", order("interleaved", K, M, devices)];
  }
  const flights = [...new Set([0, devices, 2 * devices, M].map((most) => Math.min(most, M)))];
  const modes = recompute === "auto" && room !== null ? ["auto", "always"] : [recompute];
  for (const mode of modes) {
    for (const most of flights) {
      for (const halves of split ? [false, true] : [false]) {
        for (const [patience, share] of halves ? [[0, ""], [0.5, " of W/2"], [1, " of W"]] : [[0, ""]]) {
          const name = modes.length > 1 && mode === "always" ? "greedy for R" : "greedy";
          const way = `${most ? `${most} in flight` : "as 1f1b"}${halves ? `, W in waits${share}` : ""}`;
          yield [`${name}, ${way}`, joined(greedy({...problem, recompute: mode}, most, halves, patience))];
        }
      }
    }
  }
}

/** A W that directly follows its I is one B with it on the first stage, where no other waits for the I. */
function joined(rows) {
  return rows.map((row) => row.reduce((made, a) => {
    const last = made.at(-1);
    if (a.kind === "W" && a.stage === 0 && last && key(last) === key(act("I", 0, a.micro_batch))) {
      made[made.length - 1] = act("B", 0, a.micro_batch);
    } else {
      made.push(a);
    }
    return made;
  }, []));
}

/** With recomputation, in the waits if that is faster and fits. */
function tryOrder(problem, name, order) {
  let {recompute} = problem;
  if (recompute === "auto") {
    recompute = "never";
    if (problem.room !== null) {
      const found = fewestRecomputations(order, problem.sizes, problem.room);
      if (greatest(found.missing) > 0) return {name, seconds: null, rows: withRecomputation(order, "always")};
      recompute = found.recomputed;
    }
  }
  const rows = withRecomputation(order, recompute);
  if (!fits(problem, rows)) return {name, seconds: null, rows};
  const best = {name, seconds: endOf(simulate(rows, problem)), rows};
  if (rows.some((row) => row.some((a) => a.kind === "R"))) {
    const earlier = inWaits(problem, rows);
    const seconds = fits(problem, earlier) ? endOf(simulate(earlier, problem)) : Infinity;
    if (seconds < best.seconds) return {name: `${name}, R in waits`, seconds, rows: earlier};
  }
  return best;
}

function fits({sizes, room, micro_batches: M}, rows) {
  const peak = (actions, k) => greatest(memory(actions, range(M, () => sizes[k])), 0);
  return room === null || stagesOf(rows).every((actions, k) => peak(actions, k) <= room[k]);
}

/** Seconds of an action that keeps what its backward needs. */
const secondsOf = (stages, a) => stages[a.stage][{B: "backward", I: "inputs", W: "weights"}[a.kind] || "graph"];

/** The same, but a recomputation begins where the device would else wait for what comes before its backward. */
function inWaits(problem, rows) {
  const starts = new Map(), of = (a) => `${a.stage} ${a.micro_batch}`;
  for (const span of simulate(rows, problem).spans.flat()) starts.set(key(span.action), span.start);
  return rows.map((row) => {
    const ahead = row.filter((a) => a.kind === "R"), taken = new Set(), begun = new Set(), made = [];
    let free = 0;
    const take = (a) => {
      made.push(a);
      taken.add(key(a));
    };
    for (const a of row) {
      if (taken.has(key(a))) continue;
      let wait = starts.get(key(a)) - free;
      while (ahead.length && (taken.has(key(ahead[0])) || key(ahead[0]) === key(a))) ahead.shift();
      while (ahead.length && wait > 0 && begun.has(of(ahead[0]))) {
        const seconds = problem.stages[ahead[0].stage].graph;
        if (seconds > 2 * wait) break; // more would be lost than won
        take(ahead.shift());
        wait -= seconds;
      }
      take(a);
      if (a.kind === "F") begun.add(of(a));
      free = starts.get(key(a)) + secondsOf(problem.stages, a);
    }
    return made;
  });
}

/** Places one action after the other, as devices become free: a backward that a neighbour waits for, then a forward,
 *  then gradients of weights. `most` micro-batches of a stage are in flight (0: as many as 1f1b has); if `split`,
 *  backwards are cut in two, and a W begins in a wait of at least the share `patience` of what it takes. */
function greedy(problem, most, split, patience) {
  const {stages, edges, device_of_stage, micro_batches: M, sizes, room} = problem;
  const devices = 1 + greatest(device_of_stage), K = stages.length, more = (Math.floor(K / devices) - 1) * devices;
  const mostOf = stages.map((_, k) => most || Math.min(M, K - k + more));
  const ofDevice = range(devices, (d) => range(K).filter((k) => device_of_stage[k] === d));
  const rows = range(devices, () => []), busy = range(devices, () => false), events = new Heap();
  const next = {F: range(K, () => 0), B: range(K, () => 0), W: range(K, () => 0)}, heldBytes = range(K, () => 0);
  const there = new Map(range(M, (m) => [key(act("F", 0, m)), 0])), linkFree = new Map();
  const recomputed = ["always", "except_last"].includes(problem.recompute);
  const kept = (k) => recomputed ? sizes[k].input : sizes[k].graph;
  const wake = (when, d) => events.push([when, 1, d, null]); // all that ends then comes first
  const arrives = (kind, k) => {
    const m = next[kind][k], when = m < M ? there.get(key(act(kind, k, m))) : undefined;
    return when === undefined ? Infinity : when;
  };

  function hasRoom(k) {
    const begun = next.F[k], flying = begun - next.B[k], late = split ? begun - next.W[k] : 0;
    if (begun >= M || flying >= mostOf[k] || late >= 2 * greatest(mostOf)) return false;
    return room === null || begun === 0 || flying === 0 || heldBytes[k] + sizes[k].graph <= room[k];
  }

  function begin(now, d) {
    const back = [...ofDevice[d]].reverse();
    const backward = back.find((k) => arrives("B", k) <= now);
    if (backward !== undefined) return take(now, d, act(split ? "I" : "B", backward, next.B[backward]));
    const forward = back.find((k) => arrives("F", k) <= now && hasRoom(k));
    if (forward !== undefined) return take(now, d, act("F", forward, next.F[forward]));
    const late = (k) => next.B[k] - next.W[k];
    const waiting = split ? ofDevice[d].filter((k) => late(k) > 0) : [];
    if (!waiting.length) return undefined;
    const k = waiting.reduce((one, other) => late(other) > late(one) ? other : one);
    const awaited = (of) => Math.min(arrives("B", of), hasRoom(of) ? arrives("F", of) : Infinity);
    const wait = -greatest(ofDevice[d].map((of) => -awaited(of))) - now;
    if (wait >= patience * stages[k].weights) take(now, d, act("W", k, next.W[k]));
    return undefined;
  }

  function take(now, d, a) {
    rows[d].push(a);
    busy[d] = true;
    next[a.kind === "I" ? "B" : a.kind][a.stage]++;
    if (a.kind === "F") heldBytes[a.stage] += kept(a.stage);
    events.push([now + secondsOf(stages, a), 0, d, a]);
  }

  function end(now, {kind, stage, micro_batch}) {
    if (kind === "B" || kind === "I") heldBytes[stage] += (kind === "I" ? sizes[stage].weights : 0) - kept(stage);
    if (kind === "W") heldBytes[stage] -= sizes[stage].weights;
    const forward = kind === "F", sends = forward || ((kind === "B" || kind === "I") && stage > 0);
    if (!sends) return;
    const receiver = !forward ? stage - 1 : Math.min(stage + 1, K - 1);
    const sent = forward && stage < K - 1 ? "F" : "B";
    const arrival = arrivalOf(now, sent, stage, receiver);
    there.set(key(act(sent, receiver, micro_batch)), arrival);
    wake(arrival, device_of_stage[receiver]);
  }

  function arrivalOf(now, kind, sender, receiver) {
    if (!edges.length || device_of_stage[sender] === device_of_stage[receiver]) return now;
    const edge = edges[Math.min(sender, receiver)], link = `${kind}${receiver}`;
    linkFree.set(link, Math.max(now, linkFree.get(link) || 0) + (kind === "F" ? edge.forward : edge.backward));
    return linkFree.get(link);
  }

  for (let d = 0; d < devices; d++) wake(0, d);
  while (events.size) {
    const [now, begins, d, a] = events.pop();
    if (begins) {
      if (!busy[d]) begin(now, d);
    } else {
      busy[d] = false;
      end(now, a);
      wake(now, d);
    }
  }
  return rows;
}
