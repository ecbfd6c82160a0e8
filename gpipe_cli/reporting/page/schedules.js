// The schedule of a step as data: rows of actions {kind, stage, micro_batch}, one row per device or stage. The same
// rules as in schedule/{schedule,placement,named_schedules,dependencies,recomputation}.py, where they are
// explained; a test in a browser holds the two against each other.

const SCHEDULES = ["gpipe", "1f1b", "interleaved", "zero_bubble"]; // of others the page has only the plan's order

const act = (kind, stage, micro_batch) => ({kind, stage, micro_batch});
const key = (a) => `${a.stage}${a.kind}${a.micro_batch}`;
const sendsGradient = (a) => a.kind === "B" || a.kind === "I";
const NEEDED = {F: [], R: ["F"], B: ["F", "R"], I: ["F", "R"], W: ["I"]}; // earlier actions of the same stage
const range = (count, make = (n) => n) => Array.from({length: count}, (_, n) => make(n));
const sum = (values) => values.reduce((total, value) => total + value, 0);
const maxOf = (values, least = -Infinity) => values.reduce((most, value) => Math.max(most, value), least);

/** The map's value for a name, made now if it is missing. */
function getOrMake(known, name, make) {
  if (!known.has(name)) known.set(name, make());
  return known.get(name);
}

/** The action that is written `2F0`. */
function action(text) {
  const found = /^(\d+)([FRBIW])(\d+)$/.exec(text);
  if (!found) throw new Error(`${text} is not an action`);
  return act(found[2], Number(found[1]), Number(found[3]));
}

/** The actions of each stage, in order. */
function stagesOf(rows) {
  const stages = range(1 + maxOf(rows.flat().map((a) => a.stage), -1), () => []);
  for (const row of rows) for (const a of row) stages[a.stage].push(a);
  return stages;
}

/** The row of each stage. */
function rowsOf(rows) {
  const found = [];
  rows.forEach((row, number) => row.forEach((a) => { found[a.stage] = number; }));
  return found;
}

const microBatches = (rows) => 1 + maxOf(rows.flat().map((a) => a.micro_batch), -1);

/** A function: the key of the action of another stage whose result an action waits for, or null. */
function sources(rows) {
  const last = maxOf(rows.flat().map((a) => a.stage), -1);
  const split = new Set(rows.flat().filter((a) => a.kind === "I").map(key));
  return (a) => {
    if (a.kind === "F" && a.stage > 0) return key(act("F", a.stage - 1, a.micro_batch));
    if (!sendsGradient(a) || a.stage === last) return null;
    const half = key(act("I", a.stage + 1, a.micro_batch));
    return split.has(half) ? half : key(act("B", a.stage + 1, a.micro_batch));
  };
}

// --- where stages are

/** The device of each of K stages: neighbours, with `each` of them on a device except the last, looped, or v. */
function placeStages(name, K, each) {
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

/** A row for each device: its stages' actions in an order that it can run. */
function rowsOfDevices(rows, device_of_stage) {
  const devices = range(1 + maxOf(device_of_stage), () => []);
  for (const a of topologicalOrder(rows, device_of_stage)) devices[device_of_stage[a.stage]].push(a);
  return devices;
}

// --- named orders

const pass = (kind, stage, M) => range(M, (m) => act(kind, stage, m));

/** The order called `name`, without recomputation. */
function order(name, K, M, devices = K) {
  switch (name) {
    case "gpipe": return range(K, (k) => [...pass("F", k, M), ...pass("B", k, M).reverse()]);
    case "1f1b": return range(K, (k) => inTurns(pass("F", k, M), pass("B", k, M), K - 1 - k));
    case "interleaved": return interleaved(K, M, devices);
    case "zero_bubble": return range(K, (k) => zeroBubble(k, K, M));
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

// --- recomputation

/** The micro-batches of a stage whose backward directly follows their forward: recomputing them gains nothing. */
function backwardFollowsForward(stageActions) {
  const left = stageActions.filter((a) => a.kind !== "R"), found = new Set();
  left.forEach((a, n) => {
    const before = left[n - 1];
    if (sendsGradient(a) && before && before.kind === "F" && before.micro_batch === a.micro_batch) found.add(a.micro_batch);
  });
  return found;
}

/** With an R before each backward that needs one. `mode`: always, except_last or never. */
function withRecomputation(rows, mode) {
  if (rows.some((row) => row.some((a) => a.kind === "R"))) return rows;
  const recomputed = stagesOf(rows).map((actions, k) => {
    if (mode === "never") return new Set();
    const free = mode === "except_last" ? backwardFollowsForward(actions) : new Set();
    return new Set(actions.filter((a) => sendsGradient(a) && !free.has(a.micro_batch)).map((a) => a.micro_batch));
  });
  const needed = (a) => sendsGradient(a) && recomputed[a.stage].has(a.micro_batch);
  return rows.map((row) => row.flatMap((a) => needed(a) ? [act("R", a.stage, a.micro_batch), a] : [a]));
}

/** What a stage has saved of the micro-batch after each of its actions: nothing, input, graph or weights. */
function savedAfterActions(stageActions) {
  const ofKind = (test) => new Set(stageActions.filter(test).map((a) => a.micro_batch));
  const backward = ofKind(sendsGradient), recomputed = ofKind((a) => a.kind === "R");
  return stageActions.map((a) => {
    if (a.kind === "B" || a.kind === "W" || !backward.has(a.micro_batch)) return "nothing";
    if (a.kind === "I") return "weights";
    return a.kind === "F" && recomputed.has(a.micro_batch) ? "input" : "graph";
  });
}

// --- dependencies

/** Arrays of numbers in order, compared entry by entry; the least comes first. */
class Queue {
  constructor() { this.entries = []; }
  get size() { return this.entries.length; }
  get first() { return this.entries[0]; }
  push(entry) {
    let low = 0, high = this.size;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (before(entry, this.entries[middle])) high = middle;
      else low = middle + 1;
    }
    this.entries.splice(low, 0, entry);
  }
  pop() { return this.entries.shift(); }
}

function before(one, other) {
  const at = one.findIndex((value, n) => value !== other[n]);
  return at >= 0 && one[at] < other[at];
}

/** The actions in an order that one process can run. Throws if there is none. */
function topologicalOrder(rows, device_of_stage) {
  const home = rowsOf(rows), source = sources(rows), device = device_of_stage || home;
  const next = rows.map(() => 0), ended = new Set();
  const urgency = (a) => [["B", "I", "R", "F", "W"].indexOf(a.kind), a.kind === "F" ? -a.stage : a.stage];
  const ready = range(1 + maxOf(device), () => new Queue()), offered = new Set(), ordered = [];
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
    const tick = ready.filter((queue) => queue.size).map((queue) => queue.pop()[2]);
    changed = new Set();
    for (const a of tick) {
      next[home[a.stage]]++;
      ended.add(key(a));
      offered.delete(home[a.stage]);
      for (const k of [a.stage - 1, a.stage, a.stage + 1]) if (home[k] !== undefined) changed.add(home[k]);
    }
    const place = (a) => a.kind === "F" ? [0, a.stage] : [1, -a.stage];
    ordered.push(...tick.sort((a, b) => before(place(a), place(b)) ? -1 : 1));
  }
  if (rows.some((row, number) => next[number] < row.length)) throw new Error("deadlock");
  return ordered;
}

/** null, or why rows, of which each has the right actions, cannot run in their order. */
function check(rows) {
  const stages = stagesOf(rows);
  for (const actions of stages) {
    const at = new Map(actions.map((a, n) => [key(a), n]));
    for (const [n, a] of actions.entries()) {
      const needed = NEEDED[a.kind].map((kind) => key({...a, kind})).find((other) => at.get(other) > n);
      if (needed) return `${key(a)} needs ${needed}, which comes after it`;
    }
  }
  for (const [sender, receiver, travels] of range(stages.length - 1).flatMap((k) =>
    [[k, k + 1, (a) => a.kind === "F"], [k + 1, k, sendsGradient]])) {
    const received = stages[receiver].filter(travels);
    const n = stages[sender].filter(travels).findIndex((a, at) => a.micro_batch !== received[at].micro_batch);
    if (n >= 0) return `stage ${receiver} expects ${key(received[n])} while stage ${sender} sends another micro-batch`;
  }
  try {
    topologicalOrder(rows);
  } catch {
    return "stages would wait for each other in a circle";
  }
  return null;
}

/** The text of a file that `schedule=FILE.csv` runs: a row for each device. */
function csv(rows, device_of_stage) {
  return rowsOfDevices(rows, device_of_stage).map((row) => `${row.map(key).join(",")}\n`).join("");
}
