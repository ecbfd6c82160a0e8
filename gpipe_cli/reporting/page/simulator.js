// The simulation of a schedule, by the same rules as schedule/{simulator,breakdown}.py: seconds of each action, idle
// time and its causes, and the bytes held.

/** When each action runs. `stages`: {forward, graph, backward, inputs, weights, update, sum} seconds of each; `edges`:
 *  {forward, backward} seconds between neighbours, none if left out; `slowdown[n - 1]`: the factor of all durations
 *  while n devices compute; `device_of_stage`: the device of each stage; `ties`: {stages, seconds} of weights that several
 *  stages have; `skips`: {sender, receiver, forward, backward} between stages that are not adjacent. In the timeline,
 *  `transfers` maps an action to the transfers that it waits for: {from: the sending action, end}.
 *  Throws for a schedule that deadlocks. */
function simulate(rows, {stages, edges = [], slowdown = [], device_of_stage = null, ties = [], skips = []}) {
  const device = device_of_stage && device_of_stage.length ? device_of_stage : rowsOf(rows), source = sources(rows);
  const devices = range(1 + maxOf(device)), left = devices.map(() => []), next = devices.map(() => 0);
  const retains = new Map(), seconds = {B: "backward", I: "inputs", W: "weights"};
  const ofStage = stagesOf(rows).map((actions) => {
    savedAfterActions(actions).forEach((what, n) => retains.set(key(actions[n]), what));
    return actions.length;
  });
  const cost = (a) => stages[a.stage][seconds[a.kind] || (retains.get(key(a)) === "graph" ? "graph" : "forward")];
  for (const a of topologicalOrder(rows, device)) left[device[a.stage]].push(a);
  const updates = devices.map((d) => [...stages.keys()].filter((k) => device[k] === d && stages[k].update > 0));
  const spans = stages.map(() => []), events = stages.map(() => []);
  const free = devices.map(() => 0), started = devices.map(() => 0), addedUp = devices.map(() => 0);
  const tied = devices.map(() => []);
  for (const tie of ties) {
    const having = new Set(tie.stages.map((k) => device[k]));
    if (having.size > 1) having.forEach((d) => tied[d].push({having: [...having], seconds: tie.seconds}));
  }
  const computing = new Queue(), arriving = new Queue();
  const ended = new Map(), transfers = new Map(), waiting = new Map();
  const ahead = stages.map(() => []), back = stages.map(() => []); // the links by which a stage gets what it needs
  const neighbours = edges.map((edge, k) => ({...edge, sender: k, receiver: k + 1}));
  for (const {sender, receiver, forward, backward} of edges.length ? [...neighbours, ...skips] : []) {
    if (device[sender] === device[receiver]) continue;
    ahead[receiver].push({from: sender, seconds: forward, free: 0});
    back[sender].push({from: receiver, seconds: backward, free: 0});
  }
  let now = 0, virtual = 0; // ends are on a virtual clock, which counts undisturbed work

  function begin(d) {
    const a = left[d][next[d]];
    if (!a) {
      if (awaitsTied(d)) return;
      const summed = maxOf(tied[d].map(({having, seconds}) => maxOf(having.map((o) => addedUp[o])) + seconds),
        addedUp[d]);
      if (summed > now) {
        events[device.indexOf(d)].push({what: "transfer", start: now, end: summed, action: null});
        arriving.push([summed, d]);
      } else if (updates[d].length) {
        compute(d, stages[updates[d][0]].update);
      }
      return;
    }
    const needed = source(a);
    let sent = null;
    if (needed !== null) {
      if (!ended.has(needed)) {
        waiting.set(needed, d);
        return;
      }
      sent = ended.get(needed);
      const arrival = arrivalOf(a, sent);
      if (arrival > now) {
        arriving.push([arrival, d]);
        return;
      }
    }
    if (now > free[d]) events[a.stage].push(...gap(a, free[d], now, sent));
    compute(d, cost(a));
  }

  const awaitsTied = (d) => tied[d].some(({having}) => having.some((o) => next[o] < left[o].length));

  function compute(d, duration) {
    started[d] = now;
    computing.push([virtual + duration, d]);
  }

  function finish(d) {
    const start = started[d], a = left[d][next[d]];
    free[d] = now;
    if (!a) {
      events[updates[d].shift()].push({what: "update", start, end: now, action: null});
      begin(d);
      return;
    }
    next[d]++;
    spans[a.stage].push({action: a, start, end: now});
    ended.set(key(a), now);
    if (!--ofStage[a.stage]) addedUp[d] = Math.max(addedUp[d], now) + stages[a.stage].sum;
    begin(d);
    if (waiting.has(key(a))) {
      const other = waiting.get(key(a));
      waiting.delete(key(a));
      begin(other);
    }
    if (next[d] < left[d].length) return;
    const others = new Set(tied[d].flatMap(({having}) => having).filter((o) => o !== d));
    for (const o of [...others].sort((x, y) => x - y)) {
      if (next[o] === left[o].length && !awaitsTied(o)) begin(o);
    }
  }

  /** The time at which all inputs of an action have arrived. */
  function arrivalOf(a, sent) {
    const came = getOrMake(transfers, key(a), () => (a.kind === "F" ? ahead : back)[a.stage].map((link) => carry(link, a)));
    return maxOf(came.map((transfer) => transfer.end), sent);
  }

  /** A link moves one micro-batch after another. */
  function carry(link, a) {
    const sent = (a.kind === "F" ? ["F"] : ["B", "I"]).map((kind) => act(kind, link.from, a.micro_batch));
    const from = sent.find((one) => ended.has(key(one)));
    const start = Math.max(ended.get(key(from)), link.free);
    return {from, end: link.free = start + link.seconds};
  }

  devices.forEach(begin);
  while (computing.size || arriving.size) {
    const busy = computing.size;
    const factor = slowdown.length && busy ? slowdown[Math.min(busy, slowdown.length) - 1] : 1;
    if (busy) {
      const to = computing.first[0], end = slowdown.length ? now + Math.max(0, to - virtual) * factor : to;
      if (!arriving.size || end <= arriving.first[0]) {
        now = end;
        virtual = to;
        finish(computing.pop()[1]);
        continue;
      }
    }
    const [arrival, d] = arriving.pop();
    virtual = slowdown.length ? virtual + (arrival - now) / factor : arrival;
    now = arrival;
    begin(d);
  }
  return {spans, events, device_of_stage: [...device], transfers};
}

/** The events of the wait before an action that starts when its device has been free for a while. */
function gap(a, free, start, sent) {
  const came = sent === null ? start : Math.max(free, Math.min(sent, start));
  const parts = [["waiting", free, came], ["transfer", came, start]];
  return parts.filter(([, from, to]) => to > from).map(([what, from, to]) => ({what, start: from, end: to, action: a}));
}

/** When the first action begins and the last one ends. */
function windowOf(timeline) {
  const spans = timeline.spans.flat();
  if (!spans.length) return [0, 0];
  return [-maxOf(spans.map((span) => -span.start)), maxOf(spans.map((span) => span.end))];
}

/** The end of the last action or of a later event. */
const endOf = (timeline) => maxOf(timeline.events.flat().map((event) => event.end), windowOf(timeline)[1]);

const overlapSeconds = (event, begin, end) => Math.max(0, Math.min(event.end, end) - Math.max(event.start, begin));

/** For each device, the actions and events of its stages and how long it was busy, idle and neither. */
function devicesOf(timeline, stepSeconds) {
  const [begin, end] = windowOf(timeline), found = new Map();
  timeline.spans.forEach((spans, k) => {
    const d = timeline.device_of_stage && timeline.device_of_stage.length ? timeline.device_of_stage[k] : k;
    if (!found.has(d)) found.set(d, {device: d, spans: [], events: []});
    const one = found.get(d); // arguments of `push` would be too many for a browser's stack
    one.spans = one.spans.concat(spans);
    one.events = one.events.concat(timeline.events[k]);
  });
  return [...found.values()].map((one) => {
    const besides = one.events.filter((event) => event.what === "transfer" || event.what === "update");
    const busy = sum(one.spans.map((span) => span.end - span.start));
    const within = sum(besides.map((event) => overlapSeconds(event, begin, end)));
    const alone = besides.filter((event) => event.action === null);
    const outside = sum(alone.map((event) => event.end - event.start - overlapSeconds(event, begin, end)));
    const setUp = Math.max(0, stepSeconds - (end - begin) - outside);
    return {...one, besides, busy, idle: Math.max(0, end - begin - busy - within), setUp};
  });
}

/** Seconds of imbalance of each device: how much less it computes than the busiest one, at most its idle time. */
function imbalances(devices, M) {
  const most = maxOf(devices.map((one) => one.busy));
  const unequal = devices.map((one) => (most - one.busy) * (M - 1) / M);
  const found = devices.map((one, n) => Math.min(one.idle, unequal[n]));
  let rest = Math.min(sum(devices.map((one) => one.idle)), sum(unequal)) - sum(found);
  return found.map((seconds, n) => {
    const more = Math.max(0, Math.min(rest, devices[n].idle - seconds));
    rest -= more;
    return seconds + more;
  });
}

/** Shares of the time of all devices: compute, recompute, bubble, imbalance, transfer, update, set_up. */
function breakdown(timeline, M, stepSeconds) {
  const [begin, end] = windowOf(timeline), devices = devicesOf(timeline, stepSeconds);
  const busy = sum(devices.map((one) => one.busy)), idle = sum(devices.map((one) => one.idle));
  const again = timeline.spans.flat().filter((span) => span.action.kind === "R");
  const recompute = sum(again.map((span) => span.end - span.start));
  const length = (event) => event.action === null ? event.end - event.start : overlapSeconds(event, begin, end);
  const of = (what) => devices.flatMap((one) => one.besides).filter((event) => event.what === what);
  const transfer = sum(of("transfer").map(length)), update = sum(of("update").map((event) => event.end - event.start));
  const setUp = sum(devices.map((one) => one.setUp)), imbalance = Math.min(idle, sum(imbalances(devices, M)));
  const total = busy + transfer + update + idle + setUp, scale = total > 0 ? 1 / total : 0;
  return {
    compute: (busy - recompute) * scale, recompute: recompute * scale, bubble: (idle - imbalance) * scale,
    imbalance: imbalance * scale, transfer: transfer * scale, update: update * scale, set_up: setUp * scale,
  };
}

/** [device, idle times], by device; an idle time is {start, end, why}: bubble, imbalance, transfer or set_up. Imbalance is
 *  assigned to the device's waits between its first and its last action, the longest first. */
function idleRegions(timeline, M, stepSeconds) {
  const [begin, end] = windowOf(timeline), devices = devicesOf(timeline, stepSeconds), unequal = imbalances(devices, M);
  const found = devices.map((one, n) => {
    const within = one.besides.map((e) => ({start: Math.max(e.start, begin), end: Math.min(e.end, end)}));
    const waits = gapsBetween([...one.spans, ...within], begin, end);
    const first = -maxOf(one.spans.map((span) => -span.start)), last = maxOf(one.spans.map((span) => span.end));
    const outer = (wait) => wait.end <= first || wait.start >= last ? 1 : 0;
    const regions = [];
    let left = unequal[n];
    const length = (wait) => wait.end - wait.start;
    for (const wait of [...waits].sort((a, b) => outer(a) - outer(b) || length(b) - length(a))) {
      const middle = wait.end - Math.min(left, length(wait));
      left -= wait.end - middle;
      regions.push({start: wait.start, end: middle, why: "bubble"}, {start: middle, end: wait.end, why: "imbalance"});
    }
    for (const event of one.besides.filter((e) => e.what === "transfer")) {
      const cut = event.action === null ? event : {start: Math.max(event.start, begin), end: Math.min(event.end, end)};
      regions.push({start: cut.start, end: cut.end, why: "transfer"});
    }
    const alone = one.besides.filter((event) => event.action === null);
    const step = gapsBetween([{start: begin, end}, ...alone], Math.min(0, begin), Math.min(0, begin) + stepSeconds);
    regions.push(...step.map((wait) => ({...wait, why: "set_up"})));
    const seen = regions.filter((region) => region.end > region.start).sort((a, b) => a.start - b.start);
    return [one.device, seen];
  });
  return found.sort((a, b) => a[0] - b[0]);
}

/** The parts of a window that none of `pieces` covers. */
function gapsBetween(pieces, begin, end) {
  const found = [];
  let free = begin;
  for (const piece of [...pieces].sort((a, b) => a.start - b.start)) {
    if (piece.end <= piece.start) continue;
    if (piece.start > free) found.push({start: free, end: Math.min(piece.start, end)});
    free = Math.max(free, piece.end);
  }
  if (free < end) found.push({start: free, end});
  return found;
}

const NONE = {graph: 0, input: 0, gradients: 0, weights: 0};

/** The bytes held for micro-batches in flight while each action of a stage runs, and after it: [during, after];
 *  `sizes` of each micro-batch. */
function bytesHeld(stageActions, sizes) {
  const kept = savedAfterActions(stageActions), ways = Object.keys(NONE);
  let now = 0;
  return stageActions.map((a, n) => {
    const bytes = (counts) => sum(counts.map((count, way) => count * sizes[a.micro_batch][ways[way]]));
    const [begins, ends] = data.holds[`${a.kind} ${kept[n]}`].map(bytes), during = now + begins;
    return [during, now = during + ends];
  });
}

const memory = (stageActions, sizes) => bytesHeld(stageActions, sizes).map(([during]) => during);

/** The bytes that all stages of each device hold for micro-batches in flight while each of its actions runs; `sizes` of
 *  each stage and micro-batch. */
function deviceMemory(rows, device_of_stage, sizes) {
  const of = new Map();
  stagesOf(rows).forEach((actions, k) => bytesHeld(actions, sizes[k]).forEach((bytes, n) => of.set(key(actions[n]), bytes)));
  return rowsOfDevices(rows, device_of_stage).map((row) => {
    const now = new Map();
    let all = 0;
    return row.map((a) => {
      const [during, after] = of.get(key(a)), others = all - (now.get(a.stage) || 0);
      now.set(a.stage, after);
      all = others + after;
      return others + during;
    });
  });
}

/** For each stage, the peak bytes of skips that wait there for their `Pop`, and of gradients that wait for the backward.
 *  `skips`: {sender, receiver, sizes}, with the bytes there and back of each micro-batch. */
function peakSkipBytes(rows, skips, device_of_stage) {
  const stages = rowsOf(rows), now = stages.map(() => 0), most = stages.map(() => 0);
  for (const a of skips.length ? topologicalOrder(rows, device_of_stage) : []) {
    const forward = a.kind === "F";
    for (const {sender, receiver, sizes} of forward || sendsGradient(a) ? skips : []) {
      const size = sizes[a.micro_batch][forward ? 0 : 1];
      const [first, second] = forward ? [sender, receiver] : [receiver, sender];
      if (a.stage === second) {
        now[second] -= size;
      } else if (a.stage === first) {
        now[second] += size;
        most[second] = Math.max(most[second], now[second]);
      }
    }
  }
  return most;
}

/** The last transfer that an action waits for; undefined if there is none. */
function lastTransfer(timeline, a) {
  const came = timeline.transfers.get(key(a)) || [];
  return came.find((transfer) => transfer.end === maxOf(came.map(({end}) => end)));
}
