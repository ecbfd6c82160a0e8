// From the data of the page to a step: time and memory of layers and stages, the cut, and the result of a choice of
// settings. The same rules as in planner/{plan,cost_model,stage_memory}.py and pipeline/profile/layer_cost.py; cuts are
// in the data.

const boundsOf = (balance) => {
  let end = 0;
  return balance.map((size) => [end, end += size]);
};

// --- seconds

/** Seconds of a mean micro-batch if there are M of them: {layers: [[forward, graph, backward, inputs, weights]], edges:
 *  [[forward, backward]], skips: [{stash, pop, forward, backward}]}; undefined for an M that is not offered. */
function layerCosts(data, M) {
  const found = data.costs.of[M], {kinds} = data.costs;
  if (!found) return undefined;
  const halves = ([forward, graph, backward, inputs = backward / 2, weights = backward / 2]) =>
    [forward, graph, backward, inputs, weights];
  const layers = found.layers.map(halves);
  const skips = found.skips.map(([forward, backward], n) => ({...data.skips[n], forward, backward}));
  return {layers: kinds.map((kind) => layers[kind]), edges: kinds.slice(0, -1).map((kind) => found.edges[kind]), skips};
}

function stageCost(data, layers, first, end) {
  const of = layers.slice(first, end), stageLayers = data.layers.slice(first, end);
  const [forward, graph, backward, inputs, weights] = range(5, (n) => sum(of.map((layer) => layer[n])));
  const update = sum(stageLayers.map((layer) => layer.update)), added = sum(stageLayers.map((layer) => layer.sum));
  return {forward, graph, backward, inputs, weights, update, sum: added};
}

/** The samples of the micro-batches of the first pipeline, the largest first. */
function microBatchSizes(data, M) {
  const {step_samples: samples, replicas} = data.setting, pieces = Math.min(samples, replicas * M);
  const sizes = range(pieces, (n) => Math.floor(samples / pieces) + (n < samples % pieces ? 1 : 0));
  return sizes.slice(0, Math.floor(pieces / replicas) + (pieces % replicas ? 1 : 0));
}

/** The factors by which 1, 2, ... of the devices slow each other down while they compute. */
function slowdowns({slowdown, setting}, devices) {
  const {at_once: limit, factor, together} = slowdown, {replicas} = setting, others = Math.max(1, together - 1);
  const atOnce = limit === null ? devices * replicas : Math.min(limit, devices * replicas);
  if (factor === 1 && atOnce === devices * replicas) return [];
  return range(devices, (n) => {
    const all = (n + 1) * replicas;
    return (1 + (factor - 1) * Math.min(all - 1, others) / others) * Math.max(1, all / atOnce);
  });
}

// --- a choice of settings

const CONTROL_NAMES = ["partitions", "micro_batches", "schedule", "recompute", "stages_per_process", "placement"];
const AS_PLANNED = "as planned"; // a placement without a name

/** The controls of the plan or the run itself. `own_devices`: devices are not slowed down by sharing a machine's cores
 *  and memory. */
const originalControls = (data) => ({...Object.fromEntries(CONTROL_NAMES.map((name) => [name, data.setting[name]])),
  backward_factor: 1, link_factor: 1, own_devices: false});

/** Whether the page has this order for any setting, not only for the plan's. */
const isKnown = (schedule) => SCHEDULES.includes(schedule);

/** The controls with the placement that the order determines. */
function resolveControls(data, controls) {
  const chosen = {...originalControls(data), ...controls};
  if (CONTROL_NAMES.every((name) => chosen[name] === data.setting[name])) return chosen;
  const several = Math.min(chosen.partitions, Math.max(2, chosen.stages_per_process));
  if (chosen.schedule === "interleaved") return {...chosen, placement: "looped", stages_per_process: several};
  return isKnown(chosen.schedule) ? chosen : {...chosen, placement: data.setting.placement};
}

/** The device of each stage. Throws an error with the reason if it is impossible. */
function deviceOfStage(data, {partitions: K, stages_per_process: each, schedule, placement}) {
  const original = data.setting;
  if (K === original.partitions && each === original.stages_per_process && placement === original.placement) {
    return data.device_of_stage;
  }
  if (placement === AS_PLANNED) {
    throw new Error(`the planned placement requires K = ${original.partitions} and the planned devices; choose another one`);
  }
  const devices = Math.ceil(K / each);
  if (schedule === "interleaved" && K % devices) {
    const use = `use K = ${Math.ceil(K / devices) * devices}`;
    throw new Error(`${schedule}: ${devices} devices would have unequal numbers of stages; ${use}`);
  }
  return placeStages(placement, K, each);
}

/** The memory limit of each stage, in bytes, or null; a device's stages must stay below the sum of theirs. */
function limitOf({limit, setting}, device_of_stage) {
  if (!limit) return null;
  const most = maxOf(device_of_stage.map((device) => device_of_stage.filter((other) => other === device).length));
  return Math.floor(limit.bytes / {stage: 1, device: most,
    machine: device_of_stage.length * setting.replicas}[limit.of]);
}

/** The step of a choice of settings, for the view to draw; `problem` is the reason if it is impossible. */
function configure(data, controls) {
  try {
    return chosenStep(data, resolveControls(data, controls));
  } catch (error) {
    return {problem: error.message, timeline: null, rows: null};
  }
}

function chosenStep(data, chosen) {
  const {partitions: K, schedule, backward_factor: slower, link_factor: link} = chosen, original = data.setting;
  const sizes = microBatchSizes(data, chosen.micro_batches), M = sizes.length;
  const costs = layerCosts(data, M);
  if (!costs) throw new Error(`M = ${M}: not among ${Object.keys(data.costs.of).join(", ")}`);
  const device_of_stage = deviceOfStage(data, chosen), devices = new Set(device_of_stage).size;
  const limit = limitOf(data, device_of_stage), linked = devices > 1 ? link : 0;
  const layers = costs.layers.map(([forward, graph, ...back]) => [forward, graph, ...back.map((s) => s * slower)]);
  const sends = costs.edges.map(([forward, backward]) => [forward * linked, backward * linked]);
  const skips = costs.skips.map((skip) =>
    ({...skip, forward: skip.forward * linked, backward: skip.backward * linked}));
  const cut = cutOf(data, chosen), {balance} = cut, bounds = boundsOf(balance), problems = [];
  for (const [first, second, why] of data.shared) {
    if (bounds.some(([, end]) => first < end && end <= second)) problems.push(why);
  }
  const stages = bounds.map(([first, end]) => stageCost(data, layers, first, end));
  const edges = bounds.slice(0, -1).map(([, end]) => ({forward: sends[end - 1][0], backward: sends[end - 1][1]}));
  const long = longSkips(edges, crossingSkips(skips, balance));
  const ties = data.ties.map((tie) => ({seconds: tie.seconds * linked,
    stages: bounds.flatMap(([first, end], k) => tie.layers.some((at) => first <= at && at < end) ? [k] : [])}));
  const slowdown = chosen.own_devices ? [] : slowdowns(data, devices);
  const bytes = ([base, each], samples) => base + each * samples;
  const fixed = cut.stages.map(({held, buffers, ...stored}, k) => ({...stored, buffers: bytes(buffers, sizes[0]),
    workspace: maxOf(data.layers.slice(...bounds[k]).map(({workspace}) => bytes(workspace, sizes[0])))}));
  const heldSizes = cut.stages.map(({held}, k) => sizes.map((samples) => {
    const size = (linear) => bytes(linear, original.replays ? sizes[0] : samples);
    const ways = Object.fromEntries(Object.keys(NONE).map((way) => [way, size(held[way])]));
    return original.replays && ways.graph ? inPools(ways, data.layers.slice(...bounds[k]), size) : ways;
  }));
  const skipping = skipsToDistantStages(data, balance, sizes);
  const memoryOf = (rows) => memoryInAll(rows, device_of_stage, {fixed, heldSizes, skipping, replays: original.replays});
  const missing = (all) => limit === null ? [0] : missingBytes(all.devices, limit);
  const rows = rowsFor(data, chosen, device_of_stage, (order) => maxOf(missing(memoryOf(order))) <= 0);
  const base = {rows, balance, stages, edges, ties, skips: long, device_of_stage, slowdown,
    micro_batches: M, sizes, devices, limit_bytes: limit};
  const fault = check(rows);
  if (fault) throw new Error(fault);
  const timeline = simulate(rows, {stages, edges, slowdown, device_of_stage, ties, skips: long});
  const [begin] = windowOf(timeline), step_seconds = endOf(timeline) - begin + data.costs.set_up / devices;
  const inAll = memoryOf(rows), lacks = missing(inAll), most = maxOf(lacks);
  if (most > 0) {
    const device = lacks.indexOf(most), who = devices < K ? `device ${device}` : `stage ${device_of_stage.indexOf(device)}`;
    problems.push(`${who} lacks ${size(most)}`);
  }
  const result = {...base, timeline, step_seconds, samples_per_second: original.step_samples / step_seconds,
    breakdown: breakdown(timeline, M, step_seconds), memory: inAll.stages, device_memory: inAll.devices};
  return problems.length ? {...result, problem: problems[0]} : result;
}

/** The single-device baseline: a step that takes the whole mini-batch, recomputes nothing, and has the whole machine,
 *  whatever the controls are. Null if it does not fit. */
function baselineStep({baseline, layers}, {backward_factor}) {
  if (!baseline) return null;
  const {forward, rest} = baseline, backward = baseline.backward * backward_factor;
  const stages = [{forward, graph: forward, backward, inputs: backward, weights: 0, update: rest, sum: 0}];
  const timeline = simulate(order("gpipe", 1, 1), {stages, device_of_stage: [0]}), step_seconds = endOf(timeline);
  return {timeline, step_seconds, balance: [layers.length], breakdown: breakdown(timeline, 1, step_seconds)};
}

/** The skips that go from one stage to another, with `sender` and `receiver`. */
function crossingSkips(skips, balance) {
  const stageOf = balance.flatMap((size, k) => range(size, () => k));
  return skips.map((skip) => ({...skip, sender: stageOf[skip.stash], receiver: stageOf[skip.pop]}))
    .filter(({sender, receiver}) => sender < receiver);
}

/** The skips between stages that are not adjacent, merged for each pair of stages. The others are added to `edges`, as
 *  they are sent in one message with the next layer's input. */
function longSkips(edges, skips) {
  const found = new Map();
  for (const {sender, receiver, forward, backward} of skips) {
    const link = receiver === sender + 1 ? edges[sender]
      : getOrMake(found, `${sender} ${receiver}`, () => ({sender, receiver, forward: 0, backward: 0}));
    link.forward += forward;
    link.backward += backward;
  }
  return [...found.values()];
}

/** For each skip between stages that are not adjacent, the bytes of each micro-batch and of their gradients. */
function skipsToDistantStages(data, balance, sizes) {
  return crossingSkips(data.skips, balance).filter(({sender, receiver}) => receiver > sender + 1)
    .map((skip) => ({...skip, sizes: sizes.map((samples) => skip.bytes.map(([base, each]) => base + each * samples))}));
}

/** The bytes of a micro-batch in a stage of these layers that is replayed as CUDA graphs. Its pool also contains what a
 *  layer's backward allocates once the layers after it have freed what they saved. */
function inPools(ways, layers, size) {
  const most = maxOf(layers.map(({graphs, workspace}) => size(graphs) + size(workspace)));
  const graph = ways.graph + most - size(layers.at(-1).graphs);
  return {...ways, graph, weights: graph + ways.gradients};
}

/** The memory of each stage at its peak, and of each device, whose stages compute one at a time: {stages, devices}, with
 *  {weights, gradients, optimizer, buffers, workspace, held while each action runs} each. Stages that are replayed as
 *  CUDA graphs keep their peak. */
function memoryInAll(rows, device_of_stage, {fixed, heldSizes, skipping, replays}) {
  const waiting = peakSkipBytes(rows, skipping, device_of_stage);
  const stages = stagesOf(rows).map((actions, k) =>
    ({...fixed[k], buffers: fixed[k].buffers + waiting[k], held: memory(actions, heldSizes[k])}));
  const stagesOfDevice = range(1 + maxOf(device_of_stage), (device) => stages.filter((_, k) => device_of_stage[k] === device));
  if (stagesOfDevice.length === stages.length) return {stages, devices: stagesOfDevice.flat()};
  const devices = deviceMemory(rows, device_of_stage, heldSizes).map((together, device) => {
    const all = (name) => stagesOfDevice[device].map((of) => of[name]), kept = sum(all("held").map((held) => maxOf(held, 0)));
    const held = replays ? together.map(() => kept) : together;
    const stored = ["weights", "gradients", "optimizer", "buffers"].map((name) => [name, sum(all(name))]);
    return {...Object.fromEntries(stored), workspace: maxOf(all("workspace")), held, stages: stagesOfDevice[device].length};
  });
  return {stages, devices};
}

/** The bytes by which each device exceeds the sum of its stages' limits. */
function missingBytes(devices, limit) {
  return devices.map(({held, stages = 1, ...stored}) =>
    sum(Object.values(stored)) + maxOf(held, 0) - stages * limit);
}

/** The plan's cut; for another K, or for recomputation that the plan does not have, the fastest cut. */
function cutOf(data, {partitions: K, recompute}) {
  const {setting, cut, cuts} = data, again = (mode) => mode === "always" || mode === "except_last";
  if (K === setting.partitions && (setting.balance_given || again(recompute) === again(setting.recompute))) return cut;
  if (!cuts[K]) throw new Error(`K = ${K}: not among ${Object.keys(cuts).join(", ")}`);
  return cuts[K][again(recompute) ? 1 : 0];
}

/** The rows: as edited; the plan's, for its settings; or an order with recomputation. With `auto`, settings other than
 *  the plan's recompute nothing if that fits the memory, otherwise all that is worth it. */
function rowsFor(data, chosen, device_of_stage, fits) {
  const {schedule, recompute, partitions: K, micro_batches: M, rows} = chosen, original = data.setting;
  if (rows) return rows;
  const planned = data.rows.map((row) => row.map(action)), other = CONTROL_NAMES.filter((name) => chosen[name] !== original[name]);
  if (!other.length) return planned;
  if (!isKnown(schedule) && other.some((name) => name !== "recompute")) {
    const known = `K = ${original.partitions}, M = ${original.micro_batches}`;
    throw new Error(`the order of ${schedule} requires ${known} and the planned devices; choose another schedule first`);
  }
  if (schedule === "zero_bubble" && !original.splits) throw new Error(`${schedule}: compiled backwards cannot be split`);
  const bare = isKnown(schedule) ? order(schedule, K, M, new Set(device_of_stage).size)
    : planned.map((row) => row.filter((a) => a.kind !== "R"));
  if (recompute !== "auto") return withRecomputation(bare, recompute);
  return fits(bare) ? bare : withRecomputation(bare, "except_last");
}

window.gpipe = {
  action, key, maxOf, sources, order, withRecomputation, check, csv, microBatches, AS_PLANNED, placeStages,
  rowsOfDevices, resolveControls, isKnown, simulate, breakdown, idleRegions, memory, peakSkipBytes, stagesOf, lastTransfer,
  slowdowns, originalControls, configure, baselineStep,
};
