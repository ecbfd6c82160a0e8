// The schedule of a step as data: rows of actions {kind, stage, micro_batch}, one row per device or stage. The same
// rules as in pipeline/schedule/{schedule,placement,named_schedules,v_schedules,dependencies,recomputation,
// schedule_file}.py, where they are explained; a test in a browser holds the two against each other.

const KINDS = ["F", "R", "B", "I", "W"];
const SCHEDULES = ["gpipe", "1f1b", "interleaved", "zero_bubble", "zbv", "v_half", "v_min"];
// The placement of an order that has a row for each device.
const MADE_FOR = {interleaved: "looped", zbv: "v", v_half: "v", v_min: "v"};
const SPLITTING = ["zero_bubble", "zbv", "v_half", "v_min"]; // orders whose backwards are cut into I and W

const act = (kind, stage, micro_batch) => ({kind, stage, micro_batch});
const key = (a) => `${a.stage}${a.kind}${a.micro_batch}`;
const returns = (a) => a.kind === "B" || a.kind === "I";
const range = (count, make = (n) => n) => Array.from({length: count}, (_, n) => make(n));
const sum = (values) => values.reduce((total, value) => total + value, 0);
const greatest = (values, least = -Infinity) => values.reduce((most, value) => Math.max(most, value), least);

/** What was made for a name before, or is made now. */
function once(known, name, make) {
  if (!known.has(name)) known.set(name, make());
  return known.get(name);
}

/** The action that is written `2F0`. */
function action(text) {
  const found = /^(\d+)([FRBIW])(\d+)$/.exec(text);
  if (!found) throw new Error(`${text} is no action`);
  return act(found[2], Number(found[1]), Number(found[3]));
}

/** What each stage does, in order. */
function stagesOf(rows) {
  const stages = range(1 + greatest(rows.flat().map((a) => a.stage), -1), () => []);
  for (const row of rows) for (const a of row) stages[a.stage].push(a);
  return stages;
}

/** The row of each stage. */
function rowsOf(rows) {
  const found = [];
  rows.forEach((row, number) => row.forEach((a) => { found[a.stage] = number; }));
  return found;
}

const microBatches = (rows) => 1 + greatest(rows.flat().map((a) => a.micro_batch), -1);

/** A function: the key of the action of another stage whose result an action waits for, or null. */
function sources(rows) {
  const last = greatest(rows.flat().map((a) => a.stage), -1);
  const split = new Set(rows.flat().filter((a) => a.kind === "I").map(key));
  return (a) => {
    if (a.kind === "F" && a.stage > 0) return key(act("F", a.stage - 1, a.micro_batch));
    if (!returns(a) || a.stage === last) return null;
    const half = key(act("I", a.stage + 1, a.micro_batch));
    return split.has(half) ? half : key(act("B", a.stage + 1, a.micro_batch));
  };
}

// --- where stages are

/** The device of each of K stages: neighbours, with `each` of them on a device but the last, looped, or v. */
function placed(name, K, each) {
  const devices = Math.ceil(K / each), there = (stage) => Math.floor(stage / devices) % 2 === 0;
  switch (name) {
    case "neighbours": return range(K, (stage) => Math.floor(stage / each));
    case "looped": return range(K, (stage) => stage % devices);
    case "v":
      if (K < 2 * devices) return range(K, (stage) => stage < devices ? stage : K - 1 - stage);
      return range(K, (stage) => there(stage) ? stage % devices : devices - 1 - stage % devices);
  }
  throw new Error(`placement ${name} is unknown`);
}

/** A row for each device: its stages' actions in an order in which it can perform them. */
function rowsOfDevices(rows, device_of_stage) {
  const devices = range(1 + greatest(device_of_stage), () => []);
  for (const a of linearize(rows, device_of_stage)) devices[device_of_stage[a.stage]].push(a);
  return devices;
}

// --- orders with a name

const pass = (kind, stage, M) => range(M, (m) => act(kind, stage, m));

/** The order called `name`, without recomputation. */
function order(name, K, M, devices = K) {
  switch (name) {
    case "gpipe": return range(K, (k) => [...pass("F", k, M), ...pass("B", k, M).reverse()]);
    case "1f1b": return range(K, (k) => inTurns(pass("F", k, M), pass("B", k, M), K - 1 - k));
    case "interleaved": return interleaved(K, M, devices);
    case "zero_bubble": return range(K, (k) => zeroBubble(k, K, M));
    case "zbv": case "v_half": case "v_min": return onV(K, M, GRAPHS[name]);
  }
  throw new Error(`schedule ${name} is unknown`);
}

function inTurns(forwards, backwards, ahead) {
  const warmUp = Math.min(ahead, forwards.length);
  const pairs = forwards.slice(warmUp).flatMap((a, n) => [a, backwards[n]]);
  return [...forwards.slice(0, warmUp), ...pairs, ...backwards.slice(forwards.length - warmUp)];
}

function interleaved(K, M, devices) {
  const ofDevice = K / devices, many = Math.max(1, Math.floor(M / devices));
  const firsts = range(many + 1, (group) => Math.ceil(group * M / many));
  const groups = range(many, (n) => range(firsts[n + 1] - firsts[n], (m) => firsts[n] + m));
  return range(devices, (device) => {
    const stages = range(ofDevice, (n) => device + n * devices), back = [...stages].reverse();
    const forwards = groups.flatMap((group) => stages.flatMap((k) => group.map((m) => act("F", k, m))));
    const backwards = groups.flatMap((group) => back.flatMap((k) => group.map((m) => act("B", k, m))));
    const ahead = (ofDevice > 1 ? 2 : 1) * (devices - 1 - device);
    return inTurns(forwards, backwards, ahead + (ofDevice - 1) * groups[0].length);
  });
}

function zeroBubble(stage, K, M) {
  const made = [];
  let held = 0;
  for (const a of inTurns(pass("F", stage, M), pass(stage ? "I" : "B", stage, M), K - 1 - stage)) {
    made.push(a);
    if (a.kind === "I" && a.micro_batch >= stage) made.push(act("W", stage, held++));
  }
  while (stage && held < M) made.push(act("W", stage, held++));
  return made;
}

// The most graphs that each of so many devices holds.
const GRAPHS = {
  zbv: (devices) => 2 * devices,
  v_half: (devices) => 2 * Math.floor((devices + 2) / 2),
  v_min: (devices) => 2 * Math.floor((devices + 4) / 3),
};
const PERIOD = 6; // ticks from a micro-batch to the next

function onV(K, M, graphs) {
  const devices = Math.ceil(K / 2), most = K > 1 ? graphs(devices) : 1; // one stage gains nothing from a delayed W
  const [down, up] = most >= Math.min(GRAPHS.zbv(devices), 2 * M) ? [2, 4]
    : most >= GRAPHS.v_half(devices) ? [1, 2] : [1, 1];
  const orders = blocks(devices, down, up).map((block) => {
    const there = block.filter(({stage}) => K % 2 === 0 || stage !== devices);
    const every = there.flatMap(({tick, kind, stage}) => range(M, (m) =>
      ({tick: tick + PERIOD * m, a: act(kind, stage - (K % 2 && stage > devices ? 1 : 0), m)})));
    return every.sort((one, other) => one.tick - other.tick).map(({a}) => a);
  });
  return clocked(orders, K, most, up > 1).map(wholeBackwards);
}

/** For each device, the ticks of micro-batch 0's forwards and backwards, with kind and stage. */
function blocks(devices, down, up) {
  const last = 2 * devices - 1, found = range(devices, () => []);
  const way = [...range(last + 1, (k) => ["F", k]), ...range(last + 1, (k) => ["I", last - k])];
  let tick = 0;
  for (const [kind, stage] of way) {
    const block = found[Math.min(stage, last - stage)];
    while (block.some((other) => (tick - other.tick) % PERIOD === 0)) tick++;
    block.push({tick, kind, stage});
    tick += kind === "I" || stage === devices - 1 || stage === last ? 1 : stage < devices ? down : up;
  }
  return found;
}

/** The rows of devices that perform these forwards and backwards on a clock, with their W in between. */
function clocked(orders, K, most, ahead) {
  const rows = orders.map(() => []), delayed = orders.map(() => []), held = orders.map(() => 0);
  const ended = {F: range(K, () => 0), I: range(K, () => 0), W: range(K, () => 0)};
  const ready = ({kind, stage, micro_batch: m}) => {
    if (kind === "F") return stage === 0 || ended.F[stage - 1] > m;
    return ended.F[stage] > m && (stage === K - 1 || ended.I[stage + 1] > m);
  };
  const early = (device, left) => { // the next forward of the way down, if there is room for it until its turn
    let room = most - held[device];
    for (const a of left) {
      if (room === 0) return null;
      if (a.kind === "F" && a.stage === device) return a;
      room += a.kind === "F" ? -1 : 1;
    }
    return null;
  };
  const chosen = (left, device) => {
    if (left.length && ready(left[0]) && (left[0].kind !== "F" || held[device] < most)) return left.shift();
    if (delayed[device].length) return delayed[device].shift();
    const next = ahead ? early(device, left) : null;
    return next && ready(next) ? left.splice(left.indexOf(next), 1)[0] : null;
  };
  while ([...orders, ...delayed].some((left) => left.length)) {
    orders.map(chosen).forEach((a, device) => {
      if (!a) return;
      rows[device].push(a);
      ended[a.kind][a.stage]++;
      if (a.kind === "I") delayed[device].push(act("W", a.stage, a.micro_batch));
      else held[device] += a.kind === "F" ? 1 : -1;
    });
  }
  return rows;
}

/** Each I of stage 0 that its W directly follows is a B, as no stage waits for it. */
function wholeBackwards(row) {
  const made = [];
  for (const a of row) {
    const before = made[made.length - 1];
    const whole = a.kind === "W" && a.stage === 0 && key(before) === key(act("I", 0, a.micro_batch));
    if (whole) made[made.length - 1] = act("B", 0, a.micro_batch);
    else made.push(a);
  }
  return made;
}

// --- recomputation

/** The micro-batches of a stage whose backward directly follows their forward: recomputing them gains nothing. */
function backwardFollowsForward(stageActions) {
  const left = stageActions.filter((a) => a.kind !== "R"), found = new Set();
  left.forEach((a, n) => {
    const before = left[n - 1];
    if (returns(a) && before && before.kind === "F" && before.micro_batch === a.micro_batch) found.add(a.micro_batch);
  });
  return found;
}

/** With an R before each backward that needs one. `mode`: always, except_last, never, or a set for each stage. */
function withRecomputation(rows, mode) {
  if (rows.some((row) => row.some((a) => a.kind === "R"))) return rows;
  const recomputed = stagesOf(rows).map((actions, k) => {
    if (typeof mode !== "string") return new Set(mode[k]);
    if (mode === "never") return new Set();
    const free = mode === "except_last" ? backwardFollowsForward(actions) : new Set();
    return new Set(actions.filter((a) => returns(a) && !free.has(a.micro_batch)).map((a) => a.micro_batch));
  });
  const needed = (a) => returns(a) && recomputed[a.stage].has(a.micro_batch);
  return rows.map((row) => row.flatMap((a) => needed(a) ? [act("R", a.stage, a.micro_batch), a] : [a]));
}

/** For each stage the fewest micro-batches to recompute such that its activations fit into `room`, and the bytes that
 *  are missing even so. `sizes` are of one micro-batch of each stage: {graph, input, gradients, weights}. */
function fewestRecomputations(rows, sizes, room) {
  const found = stagesOf(rows).map((actions, k) => fewestOnStage(actions, sizes[k], room[k]));
  return {recomputed: found.map((one) => one.recomputed), missing: found.map((one) => one.missing)};
}

function fewestOnStage(actions, size, limit) {
  const rest = size.graph - size.input, ends = new Map(), free = backwardFollowsForward(actions);
  actions.forEach((a, at) => { if (returns(a)) ends.set(a.micro_batch, at); });
  const recomputed = new Set(), kept = new Heap();
  let inFlight = 0, graphs = 0, weights = 0, missing = 0;
  actions.forEach((a, at) => {
    const m = a.micro_batch;
    if (a.kind === "F") {
      inFlight++;
      graphs++;
      if (!free.has(m)) kept.push([-ends.get(m), m]);
    } else if (returns(a) && recomputed.has(m)) {
      graphs++;
    }
    let held = inFlight * size.input + graphs * rest + weights * size.weights + (a.kind === "I" ? size.gradients : 0);
    while (held > limit && kept.size && -kept.first[0] > at && rest > 0) {
      recomputed.add(kept.pop()[1]);
      graphs--;
      held -= rest;
    }
    missing = Math.max(missing, held - limit);
    if (returns(a)) {
      inFlight--;
      graphs--;
    }
    weights += (a.kind === "I") - (a.kind === "W");
  });
  return {recomputed, missing};
}

/** What a stage retains of the micro-batch after each of its actions: nothing, input, graph or weights. */
function retained(stageActions) {
  const ofKind = (test) => new Set(stageActions.filter(test).map((a) => a.micro_batch));
  const backward = ofKind(returns), recomputed = ofKind((a) => a.kind === "R");
  return stageActions.map((a) => {
    if (a.kind === "B" || a.kind === "W" || !backward.has(a.micro_batch)) return "nothing";
    if (a.kind === "I") return "weights";
    return a.kind === "F" && recomputed.has(a.micro_batch) ? "input" : "graph";
  });
}

// --- what waits for what

/** The least of arrays of numbers, compared entry by entry, comes first. */
class Heap {
  constructor() { this.entries = []; }
  get size() { return this.entries.length; }
  get first() { return this.entries[0]; }
  push(entry) {
    const all = this.entries;
    let at = all.push(entry) - 1;
    for (let up = (at - 1) >> 1; at > 0 && before(all[at], all[up]); up = (at - 1) >> 1) {
      [all[at], all[up]] = [all[up], all[at]];
      at = up;
    }
  }
  pop() {
    const all = this.entries, found = all[0], last = all.pop();
    if (!all.length) return found;
    all[0] = last;
    for (let at = 0, least; ; at = least) {
      least = at;
      for (const down of [2 * at + 1, 2 * at + 2]) if (down < all.length && before(all[down], all[least])) least = down;
      if (least === at) return found;
      [all[at], all[least]] = [all[least], all[at]];
    }
  }
}

function before(one, other) {
  const at = one.findIndex((value, n) => value !== other[n]);
  return at >= 0 && one[at] < other[at];
}

/** The actions in an order in which one process can perform them. Throws if there is none. */
function linearize(rows, device_of_stage) {
  const home = rowsOf(rows), source = sources(rows), device = device_of_stage || home;
  const next = rows.map(() => 0), ended = new Set();
  const urgency = (a) => [["B", "I", "R", "F", "W"].indexOf(a.kind), a.kind === "F" ? -a.stage : a.stage];
  const ready = range(1 + greatest(device), () => new Heap()), offered = new Set(), performed = [];
  let changed = new Set(rows.keys());
  while (changed.size) {
    for (const row of changed) {
      const a = rows[row][next[row]];
      if (offered.has(row) || !a) continue;
      const needed = source(a);
      if (needed !== null && !ended.has(needed)) continue;
      offered.add(row);
      ready[device[a.stage]].push([...urgency(a), a]);
    }
    const tick = ready.filter((heap) => heap.size).map((heap) => heap.pop()[2]);
    changed = new Set();
    for (const a of tick) {
      next[home[a.stage]]++;
      ended.add(key(a));
      offered.delete(home[a.stage]);
      for (const k of [a.stage - 1, a.stage, a.stage + 1]) if (home[k] !== undefined) changed.add(home[k]);
    }
    const place = (a) => a.kind === "F" ? [0, a.stage] : [1, -a.stage];
    performed.push(...tick.sort((a, b) => before(place(a), place(b)) ? -1 : 1));
  }
  if (rows.some((row, number) => next[number] < row.length)) throw new Error("deadlock");
  return performed;
}

/** The earliest tick of each action if every one takes a tick; and of rows that cannot go on, what waits for what. */
function clock(rows) {
  const source = sources(rows), ticks = rows.map(() => []), ended = new Map(), waiting = new Map();
  const ready = [...rows.keys()];
  while (ready.length) {
    const number = ready.pop(), own = ticks[number];
    let tick = own.length ? own[own.length - 1] + 1 : 0;
    while (own.length < rows[number].length) {
      const a = rows[number][own.length], needed = source(a);
      if (needed !== null) {
        if (!ended.has(needed)) {
          waiting.set(needed, [...(waiting.get(needed) || []), number]);
          break;
        }
        tick = Math.max(tick, ended.get(needed));
      }
      own.push(tick++);
      if (!ended.has(key(a))) ended.set(key(a), tick);
      ready.push(...(waiting.get(key(a)) || []));
      waiting.delete(key(a));
    }
  }
  const stuck = rows.map((row, number) => row[ticks[number].length]).filter((a) => a);
  return {ticks, waits: stuck.map((a) => [key(a), source(a)])};
}

/** null, or why a schedule cannot run: {what, marked: [keys], waits: [[key, key it waits for]]}. */
function check(rows) {
  const fault = (what, ...marked) => ({what, marked, waits: []});
  if (!rows.some((row) => row.length)) return fault("is empty: it needs at least one stage and one forward");
  const homes = new Map();
  for (const [number, row] of rows.entries()) {
    for (const a of row) {
      if (!homes.has(a.stage)) homes.set(a.stage, number);
      if (homes.get(a.stage) !== number) {
        const where = `${key(a)} is in row ${number}, and stage ${a.stage} in row ${homes.get(a.stage)}`;
        return fault(`${where}; put all actions of a stage into one row`, key(a));
      }
    }
  }
  const stages = stagesOf(rows), M = microBatches(rows), trains = rows.some((row) => row.some((a) => a.kind !== "F"));
  for (const [stage, actions] of stages.entries()) {
    const found = checkStage(stage, actions, M, trains);
    if (found) return fault(...found);
  }
  for (let stage = 0; stage < stages.length - 1; stage++) {
    for (const [sends, sender, receiver] of [["F", stage, stage + 1], ["B", stage + 1, stage]]) {
      const travels = (a) => sends === "F" ? a.kind === "F" : returns(a);
      const received = stages[receiver].filter(travels);
      for (const [n, s] of stages[sender].filter(travels).entries()) {
        const r = received[n];
        if (s.micro_batch === r.micro_batch) continue;
        const where = `stage ${sender} sends after ${key(s)} when stage ${receiver} receives for ${key(r)}`;
        return fault(`${where}; give both stages the same order of ${sends}`, key(s), key(r));
      }
    }
  }
  const {waits} = clock(rows);
  if (!waits.length) return null;
  const what = waits.map(([waiting, needed]) => `${waiting} waits for ${needed}`).join("; ");
  return {what: `deadlock (${what}); reorder the marked actions`, marked: waits.map(([waiting]) => waiting), waits};
}

function checkStage(stage, actions, M, trains) {
  const seen = Object.fromEntries(KINDS.map((kind) => [kind, new Set()]));
  const at = (kind, m) => key(act(kind, stage, m));
  for (const a of actions) {
    const {kind, micro_batch: m} = a;
    if (seen[kind].has(m)) return [`${key(a)} is there twice; remove one`, key(a)];
    if (seen.B.has(m) || (kind !== "W" && seen.I.has(m))) {
      if (kind === "R") return [`${key(a)} comes after the backward it is for; put it before`, key(a)];
      const other = at(seen.I.has(m) ? "I" : "B", m);
      return [`${key(a)} and ${other} are two backwards of one micro-batch; remove one`, key(a), other];
    }
    const needed = {F: null, W: "I"}[kind];
    const first = needed === undefined ? "F" : needed;
    if (first !== null && !seen[first].has(m)) {
      const put = at(first, m);
      return [`${key(a)} comes before ${put}, which it needs; put ${put} first`, key(a), put];
    }
    seen[kind].add(m);
  }
  for (const kind of trains ? ["F", "B", "W"] : ["F"]) {
    for (let m = 0; m < M; m++) {
      const other = {F: [], B: ["I"], W: ["B"]}[kind];
      if ([kind, ...other].some((one) => seen[one].has(m))) continue;
      return [`${at(kind, m)} is missing; add it to stage ${stage}`, at(kind, m)];
    }
  }
  return null;
}

/** The text of a file that `schedule=FILE.csv` runs: the rows as they are, or one per device if `device_of_stage`
 *  is given. */
function csv(rows, device_of_stage) {
  const devices = device_of_stage ? rowsOfDevices(rows, device_of_stage) : rows;
  const {ticks} = clock(devices);
  const columns = 1 + greatest(ticks.flat());
  return devices.map((row, number) => {
    const cells = range(columns, () => "");
    row.forEach((a, n) => { cells[ticks[number][n]] = key(a); });
    return cells.join(",") + "\n";
  }).join("");
}
