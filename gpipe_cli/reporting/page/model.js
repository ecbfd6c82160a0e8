// From the data of the page to a step: what layers and stages cost and hold, where to cut, and what a choice of
// settings leads to. The same rules as in planner/{plan,cost_model,devices,stage_memory}.py,
// pipeline/profile/layer_cost.py and pipeline/schedule/partitioner.py.

// --- memory: what ActivationMemory says

const memories = new WeakMap(); // by the data: by the samples of a micro-batch

/** The bytes of a micro-batch of `samples` on a stage of layers `first` to `end - 1`, in each way to hold it. Where
 *  backwards were not traced in halves, as much is held between them as before. */
function held(data, first, end, samples) {
  const of = activationMemory(data, samples);
  if (!of.hasGradient[first] && of.trained[end] === of.trained[first]) return NONE;
  const input = inputBytes(of, first, end), graph = graphBytes(of, first, end);
  if (!data.memory.kept) return {graph, input, gradients: 0, weights: graph};
  const gradients = keptGradients(data, of, end)[end - first];
  return {graph, input, gradients, weights: keptInputs(data, of, first)[end - first] + gradients};
}

function activationMemory(data, samples) {
  if (!memories.has(data)) memories.set(data, new Map());
  const known = memories.get(data);
  if (!known.has(samples)) known.set(samples, chargedTensors(data.memory, samples));
  return known.get(samples);
}

/** Each tensor is charged to the first layer that saves it, so that sums over layers answer for any stage but for the
 *  few tensors that cross its first boundary. */
function chargedTensors({boundaries, saved, trained}, samples) {
  const tensorBytes = boundaries.map((boundary) => boundary.map(([base, each]) => base + each * samples));
  const {crossing, total: charged} = follow(tensorBytes, saved, samples), trainedBefore = [0];
  trained.forEach((one, at) => trainedBefore.push(trainedBefore[at] + one));
  const hasGradient = boundaries.map((boundary) => boundary.some(([, , returned]) => returned));
  const pops = boundaries.map((boundary) => boundary.map(([, , , pop = -1]) => pop));
  return {samples, tensorBytes, pops, hasGradient, trained: trainedBefore, crossing, charged, walks: new Map()};
}

/** What layers save, no tensor twice: bytes in the first 0, 1, ... of them, and the tensors at each boundary, {bytes,
 *  saver: the first layer that saves it}. */
function follow(boundaries, saved, samples) {
  const tensor = (bytes) => ({bytes, saver: null});
  const crossing = [boundaries[0].map(tensor)], total = [0];
  saved.forEach(([positions, base, each, sameMemory], at) => {
    const tensors = [...crossing[at]];
    boundaries[at + 1].forEach((bytes, n) => {
      const other = sameMemory.length ? sameMemory[n] : null;
      tensors.push(other === null ? tensor(bytes) : tensors[other]);
    });
    let own = base + each * samples;
    for (const one of positions.map((position) => tensors[position])) {
      if (one.saver !== null) continue;
      one.saver = at;
      own += one.bytes;
    }
    crossing.push(tensors.slice(crossing[at].length));
    total.push(total[at] + own);
  });
  return {crossing, total};
}

function graphBytes(of, first, end) {
  let charged = of.charged[end] - of.charged[first];
  for (const tensor of new Set(of.crossing[first])) { // it is there as an input
    if (tensor.saver !== null && first <= tensor.saver && tensor.saver < end) charged -= tensor.bytes;
  }
  return inputBytes(of, first, end) + charged;
}

/** Of what crosses the first boundary of a stage; a skip comes only to the stage that pops it. */
function inputBytes({tensorBytes, pops}, first, end) {
  return sum(tensorBytes[first].filter((_, n) => pops[first][n] < end));
}

const keptInputs = (data, of, first) => once(of.walks, `inputs ${first}`, () =>
  follow(of.tensorBytes.slice(first), data.memory.kept.slice(first).map(([inputs]) => inputs), of.samples).total);

const keptGradients = (data, of, end) => once(of.walks, `gradients ${end}`, () =>
  follow(of.tensorBytes.slice(0, end + 1).reverse(),
    data.memory.kept.slice(0, end).map(([, gradients]) => gradients).reverse(), of.samples).total);

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
  const of = layers.slice(first, end), own = data.layers.slice(first, end);
  const [forward, graph, backward, inputs, weights] = range(5, (n) => sum(of.map((layer) => layer[n])));
  const update = sum(own.map((layer) => layer.update)), added = sum(own.map((layer) => layer.sum));
  return {forward, graph, backward, inputs, weights, update, sum: added};
}

/** The samples of the micro-batches of the first pipeline, the largest first. */
function microBatchSizes(data, M) {
  const {step_samples: samples, replicas} = data.setting, pieces = Math.min(samples, replicas * M);
  const sizes = range(pieces, (n) => Math.floor(samples / pieces) + (n < samples % pieces ? 1 : 0));
  return sizes.slice(0, Math.floor(pieces / replicas) + (pieces % replicas ? 1 : 0));
}

/** By how much 1, 2, ... of so many devices slow each other down while they compute. */
function slowdowns({slowdown, setting}, devices) {
  const {at_once: limit, factor, together} = slowdown, {replicas} = setting, others = Math.max(1, together - 1);
  const atOnce = limit === null ? devices * replicas : Math.min(limit, devices * replicas);
  if (factor === 1 && atOnce === devices * replicas) return [];
  return range(devices, (n) => {
    const all = (n + 1) * replicas;
    return (1 + (factor - 1) * Math.min(all - 1, others) / others) * Math.max(1, all / atOnce);
  });
}

// --- where to cut

const cuts = new Map();

/** Layers of each of K partitions: the least maximum of their costs, then the least variance, then cuts that are early.
 *  The one that ends at a place pays for what is sent on over it, the one that begins there for what is sent back. A
 *  skip {stash, pop, forward, backward} is sent on by the one that has its stash, back by the one that has its pop, if
 *  these are two. `furthest[k][i]`: how far partition k can reach from layer i; null if that leaves no cut. */
function partition(costs, K, forwardSends = [], backwardSends = [], skips = [], furthest = null) {
  const L = costs.length, sends = (given) => range(L - 1, (n) => given[n] || 0);
  const given = [...costs, ...sends(forwardSends), ...sends(backwardSends)];
  const ofSkips = skips.flatMap(({forward, backward}) => [forward, backward]);
  const ends = skips.map(({stash, pop}) => [stash, pop]);
  if (cuts.size > 200) cuts.clear();
  return once(cuts, `${K}: ${given}: ${ofSkips}: ${ends}: ${furthest}`,
    () => bestCut(wholeNumbers([...given, ...ofSkips]), L, K, ends, furthest));
}

function bestCut(whole, L, K, skips, furthest) {
  const reaches = (k, i, j) => furthest === null || j <= furthest[k][i];
  const before = [0];
  for (let n = 0; n < L; n++) before.push(before[n] + whole[n]);
  const on = before.map((cost, n) => 0 < n && n < L ? cost + whole[L + n - 1] : cost);
  const back = before.map((cost, n) => 0 < n && n < L ? cost - whole[2 * L + n - 2] : cost);
  const between = range(L + 1, (j) => range(j, (i) => on[j] - back[i])); // the cost of layers i to j - 1
  skips.forEach(([stash, pop], n) => {
    const [forward, backward] = whole.slice(3 * L - 2 + 2 * n);
    for (let j = stash + 1; j <= pop; j++) for (let i = 0; i <= stash; i++) between[j][i] += forward;
    for (let j = pop + 1; j <= L; j++) for (let i = stash + 1; i <= pop; i++) between[j][i] += backward;
  });
  const bound = furthest === null ? costOfEven(before, between, K) : Infinity; // no part of a best cut costs more
  let least = range(L + 1, (j) => j ? Infinity : 0);
  for (let k = 0; k < K; k++) { // the least maximum
    const longer = range(L + 1, () => Infinity);
    for (let j = k + 1; j <= L - K + k + 1; j++) {
      for (let i = j - 1; i >= k && before[j] - before[i] <= bound; i--) { // longer parts cost more still
        if (reaches(k, i, j)) longer[j] = Math.min(longer[j], Math.max(least[i], between[j][i]));
      }
    }
    least = longer;
  }
  const most = least[L], begins = [];
  if (most === Infinity) return null;
  let squares = range(L + 1, (j) => j ? null : 0n); // null: cannot be; of 62 bits, which a number does not have
  for (let k = 0; k < K; k++) {
    const longer = range(L + 1, () => null), begin = range(L + 1, () => 0);
    for (let j = k + 1; j <= L - K + k + 1; j++) {
      for (let i = j - 1; i >= k && before[j] - before[i] <= most; i--) {
        const cost = between[j][i];
        if (cost > most || squares[i] === null || !reaches(k, i, j)) continue;
        const total = squares[i] + BigInt(cost) ** 2n;
        if (longer[j] === null || total <= longer[j]) [longer[j], begin[j]] = [total, i]; // of equals the earliest
      }
    }
    squares = longer;
    begins.push(begin);
  }
  const sizes = [];
  for (let k = K - 1, end = L; k >= 0; end = begins[k--][end]) sizes.unshift(end - begins[k][end]);
  return sizes;
}

/** The greatest cost of a part if each cut is where the costs before it reach their share. */
function costOfEven(before, between, K) {
  const L = before.length - 1;
  let most = 0, i = 0;
  for (let k = 1; k <= K; k++) {
    let j = k < K ? i + 1 : L;
    while (k < K && j < L - K + k && before[j] * K < before[L] * k) j++;
    most = Math.max(most, between[j][i]);
    i = j;
  }
  return most;
}

/** Costs times one common factor, below 2^31 in sum; exact if they are simple enough for that. */
function wholeNumbers(costs) {
  const view = new DataView(new ArrayBuffer(8));
  const parts = costs.map((cost) => { // mantissa and exponent of two
    view.setFloat64(0, cost);
    const bits = view.getBigUint64(0), exponent = Number((bits >> 52n) & 2047n), rest = bits & ((1n << 52n) - 1n);
    return exponent ? [rest | (1n << 52n), exponent - 1075] : [rest, -1074];
  });
  const lowest = -greatest(parts.filter(([part]) => part).map(([, exponent]) => -exponent), 0);
  const exact = parts.map(([part, exponent]) => part ? part << BigInt(exponent - lowest) : 0n);
  const gcd = (a, b) => { while (b) [a, b] = [b, a % b]; return a; };
  const common = exact.reduce(gcd, 0n) || 1n, total = exact.reduce((a, b) => a + b, 0n) / common;
  if (total < 1n << 31n) return exact.map((number) => Number(number / common));
  const room = (1n << 31n) - 1n - BigInt(costs.length); // rounding may add a half for each
  return exact.map((number) => Number((2n * (number / common) * room + total) / (2n * total)));
}

// --- a choice of settings

const ONE_ORDER = ["file", "auto"]; // schedules of which the page knows the rows of the plan, and no others
const MOST_TRIED = 500000; // actions, in all simulations that look for the best move of a layer
const OWN = ["partitions", "micro_batches", "schedule", "recompute", "stages_per_process", "placement"];
const AS_PLANNED = "as planned"; // a placement without a name

/** The controls that stand for the plan or the run itself. `own_devices`: nothing that devices of one machine share, as
 *  cores and memory, slows them down. */
const ownControls = (data) => ({...Object.fromEntries(OWN.map((name) => [name, data.setting[name]])),
  backward_factor: 1, link_factor: 1, own_devices: false});

const boundsOf = (balance) => {
  let end = 0;
  return balance.map((size) => [end, end += size]);
};

/** The controls with what the order itself decides: where stages are and, in a V, how many a device has. */
function settled(data, controls) {
  const chosen = {...ownControls(data), ...controls}, {schedule, partitions: K, stages_per_process: each} = chosen;
  if (OWN.every((name) => chosen[name] === data.setting[name])) return chosen;
  const made = MADE_FOR[schedule];
  if (ONE_ORDER.includes(schedule) && !data.curve) chosen.placement = data.setting.placement;
  else if (made) chosen.placement = made;
  if (made === "v" && each < K) chosen.stages_per_process = Math.min(K, 2);
  return chosen;
}

/** The device of each stage. Throws a line that says why there can be none. */
function deviceOfStage(data, {partitions: K, stages_per_process: each, schedule, placement}) {
  const own = data.setting;
  if (K === own.partitions && each === own.stages_per_process && placement === own.placement) {
    return data.device_of_stage;
  }
  if (placement === AS_PLANNED) {
    throw new Error(`the placement as planned is for K = ${own.partitions} and its own devices; choose another one`);
  }
  const devices = Math.ceil(K / each);
  if (schedule === "interleaved" && K % devices) {
    const use = `use K = ${Math.ceil(K / devices) * devices}`;
    throw new Error(`${schedule}: ${devices} devices would have different numbers of stages; ${use}`);
  }
  return placed(placement, K, each);
}

/** The bytes that each stage must stay below, those of a device together, or null. */
function limitOf({limit, setting}, device_of_stage) {
  if (!limit) return null;
  const most = greatest(device_of_stage.map((device) => device_of_stage.filter((other) => other === device).length));
  return Math.floor(limit.bytes / {stage: 1, device: most,
    machine: device_of_stage.length * setting.replicas}[limit.of]);
}

/** Everything that follows from a choice of settings, for the view to draw; `problem` says why it cannot be. */
function configured(data, controls) {
  try {
    return chosenStep(data, settled(data, controls));
  } catch (error) {
    return {problem: error.message, timeline: null, rows: null};
  }
}

function chosenStep(data, chosen) {
  const {partitions: K, schedule, backward_factor: slower, link_factor: link} = chosen, own = data.setting;
  const sizes = microBatchSizes(data, chosen.micro_batches), M = sizes.length;
  if (K > data.layers.length) throw new Error(`K = ${K}: the model has only ${data.layers.length} layers`);
  if (M < chosen.micro_batches) throw new Error(`M = ${chosen.micro_batches}: there are only ${own.samples} samples`);
  const costs = layerCosts(data, M);
  if (!costs) throw new Error(`M = ${M}: not among ${Object.keys(data.costs.of).join(", ")}`);
  const device_of_stage = deviceOfStage(data, chosen), devices = new Set(device_of_stage).size;
  const limit = limitOf(data, device_of_stage), linked = devices > 1 ? link : 0;
  const layers = costs.layers.map(([forward, graph, ...back]) => [forward, graph, ...back.map((s) => s * slower)]);
  const sends = costs.edges.map(([forward, backward]) => [forward * linked, backward * linked]);
  const reach = () => limit === null ? null : furthestOf(data, chosen, device_of_stage, sizes, limit);
  const skips = costs.skips.map((skip) =>
    ({...skip, forward: skip.forward * linked, backward: skip.backward * linked}));
  const balance = balanceOf(data, chosen, layers, sends, skips, reach), bounds = boundsOf(balance);
  const problems = [];
  if (balance.length !== K || sum(balance) !== data.layers.length || balance.some((size) => size < 1)) {
    throw new Error(`the cut ${balance.join(" + ")} is none of ${data.layers.length} layers into ${K} stages`);
  }
  for (const [first, second, why] of data.shared) {
    if (bounds.some(([, end]) => first < end && end <= second)) problems.push(why);
  }
  const stages = bounds.map(([first, end]) => stageCost(data, layers, first, end));
  const edges = bounds.slice(0, -1).map(([, end]) => ({forward: sends[end - 1][0], backward: sends[end - 1][1]}));
  const long = longSkips(edges, crossing(skips, balance));
  const ties = data.ties.map((tie) => ({seconds: tie.seconds * linked,
    stages: bounds.flatMap(([first, end], k) => tie.layers.some((at) => first <= at && at < end) ? [k] : [])}));
  const slowdown = chosen.own_devices ? [] : slowdowns(data, devices);
  const largest = bounds.map(([first, end]) => held(data, first, end, sizes[0]));
  const fixed = bounds.map(([first, end]) => fixedMemory(data, first, end, sizes[0]));
  const room = limit === null ? null : fixed.map((one) => limit - sum(Object.values(one)));
  const heldSizes = bounds.map(([first, end]) => {
    const ofSize = new Map(sizes.map((n) => [n, held(data, first, end, n)]));
    return sizes.map((n) => ofSize.get(n));
  });
  const skipping = waitingSkips(data, balance, sizes);
  const memoryOf = (rows) => memoryInAll(rows, device_of_stage, fixed, heldSizes, skipping);
  const fits = (rows) => devices < K && greatest(lacking(memoryOf(rows).devices, limit)) <= 0;
  const rows = rowsFor(data, chosen, {device_of_stage, sizes: largest, room, fits});
  const base = {rows, balance, stages, edges, ties, skips: long, device_of_stage, slowdown,
    micro_batches: M, sizes, devices, limit_bytes: limit};
  const faulty = check(rows);
  if (faulty) return {...base, timeline: null, problem: faulty.what, faulty};
  const timeline = simulate(rows, {stages, edges, slowdown, device_of_stage, ties, skips: long});
  const [begin] = windowOf(timeline), step_seconds = endOf(timeline) - begin + data.costs.set_up / devices;
  const inAll = memoryOf(rows), lacks = limit === null ? [0] : lacking(inAll.devices, limit), most = greatest(lacks);
  if (most > 0) {
    const device = lacks.indexOf(most), who = devices < K ? `device ${device}` : `stage ${device_of_stage.indexOf(device)}`;
    const again = chosen.recompute === "auto" ? " even if it recomputes all it can" : "";
    problems.push(`${who} lacks ${size(most)}${again}`);
  }
  const result = {...base, timeline, step_seconds, samples_per_second: own.step_samples / step_seconds,
    breakdown: breakdown(timeline, M, step_seconds), memory: inAll.stages, device_memory: inAll.devices};
  return problems.length ? {...result, problem: problems[0]} : result;
}

/** The bubble of a step, and what is left of it as one cause after another is taken away that the formula
 *  (D-1)/(M+D-1) of D devices knows nothing of: shared cores, recomputation, unequal stages, transfers, and all that is
 *  not an action. Of gpipe and 1f1b the last one is the formula's. */
function bubbles(data, {rows, stages, edges, slowdown, device_of_stage, ties, skips, micro_batches: M}) {
  const sent = {edges, ties, skips}, devices = new Set(device_of_stage).size;
  const bare = rows.map((row) => row.filter((a) => a.kind !== "R"));
  const equal = device_of_stage.map((device) => { // in all as much work, and as much on each device
    const share = 1 / devices / device_of_stage.filter((other) => other === device).length;
    return Object.fromEntries(Object.keys(stages[0]).map((name) => [name, share * sum(stages.map((of) => of[name]))]));
  });
  const bubble = (order, costs, setUp = data.costs.set_up / devices) => {
    const timeline = simulate(order, {device_of_stage, ...costs});
    return breakdown(timeline, M, endOf(timeline) - windowOf(timeline)[0] + setUp).bubble;
  };
  return [
    bubble(rows, {stages, slowdown, ...sent}), bubble(rows, {stages, ...sent}), bubble(bare, {stages, ...sent}),
    bubble(bare, {stages: equal, ...sent}), bubble(bare, {stages: equal}),
    bubble(bare, {stages: equal.map((stage) => ({...stage, update: 0, sum: 0}))}, 0),
  ];
}

/** The skips that go from one stage to another, with `sender` and `receiver`. */
function crossing(skips, balance) {
  const stageOf = balance.flatMap((size, k) => range(size, () => k));
  return skips.map((skip) => ({...skip, sender: stageOf[skip.stash], receiver: stageOf[skip.pop]}))
    .filter(({sender, receiver}) => sender < receiver);
}

/** The skips between stages that are no neighbours, in one for each two stages. The others are added to `edges`, as they
 *  go in one message with what the next layer gets. */
function longSkips(edges, skips) {
  const found = new Map();
  for (const {sender, receiver, forward, backward} of skips) {
    const link = receiver === sender + 1 ? edges[sender]
      : once(found, `${sender} ${receiver}`, () => ({sender, receiver, forward: 0, backward: 0}));
    link.forward += forward;
    link.backward += backward;
  }
  return [...found.values()];
}

/** Of each skip between stages that are no neighbours, the bytes of each micro-batch. */
function waitingSkips(data, balance, sizes) {
  return crossing(data.skips, balance).filter(({sender, receiver}) => receiver > sender + 1)
    .map((skip) => ({...skip, sizes: sizes.map((samples) => skipBytes(data, skip, samples))}));
}

/** [bytes of a skip, bytes of its gradient] of a micro-batch. */
function skipBytes(data, {stash, pop}, samples) {
  const tensors = data.memory.boundaries[stash + 1].filter(([, , , popped]) => popped === pop);
  const bytes = (some) => sum(some.map(([base, each]) => base + each * samples));
  return [bytes(tensors), bytes(tensors.filter(([, , returned]) => returned))];
}

/** What each stage holds, at its own fullest moment, and what each device does, whose stages compute one at a time:
 *  {stages, devices}, of each {weights, gradients, optimizer, buffers, workspace, held while each action runs}. */
function memoryInAll(rows, device_of_stage, fixed, heldSizes, skipping) {
  const waiting = peakWaiting(rows, skipping, device_of_stage);
  const stages = stagesOf(rows).map((actions, k) =>
    ({...fixed[k], buffers: fixed[k].buffers + waiting[k], held: memory(actions, heldSizes[k])}));
  const own = range(1 + greatest(device_of_stage), (device) => stages.filter((_, k) => device_of_stage[k] === device));
  if (own.length === stages.length) return {stages, devices: own.flat()};
  const devices = deviceMemory(rows, device_of_stage, heldSizes).map((held, device) => {
    const all = (name) => own[device].map((of) => of[name]);
    const stored = ["weights", "gradients", "optimizer", "buffers"].map((name) => [name, sum(all(name))]);
    return {...Object.fromEntries(stored), workspace: greatest(all("workspace")), held, stages: own[device].length};
  });
  return {stages, devices};
}

/** The bytes by which each device is over the limits of its stages together. */
function lacking(devices, limit) {
  return devices.map(({held, stages = 1, ...stored}) =>
    sum(Object.values(stored)) + greatest(held, 0) - stages * limit);
}

/** What a stage stores all the time, and the workspace of its largest layer. */
function fixedMemory(data, first, end, samples) {
  const own = data.layers.slice(first, end), all = (name) => sum(own.map((layer) => layer[name]));
  const workspace = greatest(range(end - first, (n) => held(data, first + n, first + n + 1, samples).graph));
  const tied = tiedMemory(data, first, end);
  return {weights: all("weights_bytes") + tied.weights, gradients: all("gradients_bytes"),
    optimizer: all("optimizer_bytes") + tied.optimizer, buffers: all("buffers_bytes") + tied.buffers, workspace};
}

/** By how much a stage with tied weights differs from the sum of its layers: it has each once, and gets the gradients of
 *  layers in other stages. */
function tiedMemory(data, first, end) {
  const found = {weights: 0, optimizer: 0, buffers: 0};
  for (const tie of data.ties) {
    const here = tie.layers.filter((at) => first <= at && at < end).length;
    if (!here) continue;
    found.weights -= (here - 1) * tie.weights_bytes;
    found.optimizer -= (here - 1) * tie.optimizer_bytes;
    found.buffers += (tie.layers.length - here) * tie.gradients_bytes;
  }
  return found;
}

/** The cut: as given, that of the plan where it was made for the same, or the best one. */
function balanceOf(data, chosen, layers, sends, skips, reach) {
  const own = data.setting, again = (mode) => mode === "always" || mode === "except_last";
  const sameK = chosen.partitions === own.partitions;
  const same = sameK && chosen.micro_batches === own.micro_batches && again(chosen.recompute) === again(own.recompute)
    && chosen.backward_factor === 1 && chosen.link_factor === 1 && chosen.stages_per_process === own.stages_per_process;
  if (chosen.balance) return chosen.balance;
  if (same || (sameK && own.balance_given)) return data.balance;
  const work = layers.map(([forward, graph, backward]) => graph + backward + (again(chosen.recompute) ? forward : 0));
  const cut = (furthest) => partition(work, chosen.partitions, ...[0, 1].map((way) => sends.map((one) => one[way])),
    skips, furthest);
  const within = (at) => data.shared.some(([first, second]) => first < at && at <= second); // no cut before such a layer
  const together = (rows) => !data.shared.length ? rows : (rows || range(chosen.partitions, () => layers.map(() =>
    layers.length))).map((row) => row.map((end, at) => within(at) ? at : end));
  return cut(together(reach())) || cut(together(null)) || cut(null); // over the limit, or apart, with any
}

/** For each stage and each layer that it may begin with, how far it can reach within the limit, as if all micro-batches
 *  were as large as the largest. */
function furthestOf(data, {schedule, recompute, partitions: K}, device_of_stage, sizes, limit) {
  const L = data.layers.length, M = sizes.length, name = SCHEDULES.includes(schedule) ? schedule : "1f1b";
  const stored = [0], work = range(L, (at) => held(data, at, at + 1, sizes[0]).graph);
  for (const layer of data.layers) {
    stored.push(stored.at(-1) + layer.weights_bytes + layer.gradients_bytes + layer.optimizer_bytes
      + layer.buffers_bytes);
  }
  const bare = schedule === "file" ? data.rows.map((row) => row.map(action))
    : order(name, K, M, new Set(device_of_stage).size);
  const rows = withRecomputation(bare, recompute === "auto" ? "except_last" : recompute);
  const known = new Map();
  return stagesOf(rows).map((actions) => { // stages that hold as much at the same time reach as far
    const moments = fullest(actions, M);
    return once(known, moments.join(), () => range(L, (first) => {
      const needed = (end) => {
        const size = Object.values(held(data, first, end, sizes[0]));
        const most = greatest(moments.map((moment) => sum(moment.map((number, way) => number * size[way]))));
        return stored[end] - stored[first] + sum(Object.values(tiedMemory(data, first, end))) + most
          + greatest(work.slice(first, end));
      };
      let end = first, beyond = L;
      while (end < beyond) { // halving
        const middle = Math.floor((end + beyond) / 2);
        if (needed(middle + 1) > limit) beyond = middle;
        else end = middle + 1;
      }
      while (end > first && needed(end) > limit) end--; // it may need less again behind a layer
      return end;
    }));
  });
}

/** How many micro-batches a stage holds in each way while its actions run, of moments that no other exceeds in all. */
function fullest(actions, M) {
  const ways = Object.keys(NONE).map((way) => memory(actions, range(M, () => ({...NONE, [way]: 1}))));
  const moments = new Map(actions.map((_, n) => ways.map((of) => of[n])).map((moment) => [moment.join(), moment]));
  const exceeds = (one, other) => one !== other && one.every((number, way) => number >= other[way]);
  const all = [...moments.values()];
  return all.filter((moment) => !all.some((other) => exceeds(other, moment)));
}

/** The rows: as edited, those of the plan for its own settings, or an order with recomputation. */
function rowsFor(data, chosen, {device_of_stage, sizes, room, fits}) {
  const {schedule, recompute, partitions: K, micro_batches: M} = chosen, own = data.setting;
  if (chosen.rows) return chosen.rows.map((row) => row.map((a) => typeof a === "string" ? action(a) : a));
  const planned = () => data.rows.map((row) => row.map(action));
  const same = OWN.every((name) => chosen[name] === own[name]);
  const changed = chosen.balance || chosen.backward_factor !== 1 || chosen.link_factor !== 1;
  if (same && !(changed && recompute === "auto")) return planned();
  const recomputed = (order) => recomputedRows(order, recompute, sizes, room, fits);
  if (ONE_ORDER.includes(schedule)) { // the rows are all that is known of it
    const of = (data.curve ? data.curve.points : []).find((point) => point.rows && sameSetting(point.setting, chosen));
    if (of) return of.rows.map((row) => row.map(action));
    if (OWN.some((name) => name !== "recompute" && chosen[name] !== own[name])) {
      const known = `K = ${own.partitions}, M = ${own.micro_batches}`;
      throw new Error(`the order of ${schedule} is for ${known} and its own devices; choose another schedule`);
    }
    if (recompute === own.recompute) return planned();
    return recomputed(planned().map((row) => row.filter((a) => a.kind !== "R")));
  }
  if (SPLITTING.includes(schedule) && !own.splits) throw new Error(`${schedule}: compiled backwards cannot be halved`);
  return recomputed(order(schedule, K, M, new Set(device_of_stage).size));
}

/** Whether a point of the curve is of this choice, and of this cut if one is given. */
function sameSetting(setting, chosen) {
  return OWN.every((name) => chosen[name] === setting[name])
    && (!chosen.balance || String(chosen.balance) === String(setting.balance));
}

/** `auto`: none without a limit or if devices with several stages fit so, as few as fit each stage's share of its device,
 *  and all but the last if nothing fits. */
function recomputedRows(rows, recompute, sizes, room, fits) {
  if (recompute !== "auto") return withRecomputation(rows, recompute);
  if (room === null || fits(rows)) return rows;
  const {recomputed, missing} = fewestRecomputations(rows, sizes, room);
  return withRecomputation(rows, greatest(missing) > 0 ? "except_last" : recomputed);
}

/** What a step takes if one layer moves over a boundary, the shortest first: {from_stage, to_stage, layer, balance,
 *  step_seconds}; moves that do not fit are left out, and of a large step those that do not touch its slowest stage. */
function moves(data, controls) {
  const base = configured(data, controls);
  if (!base.timeline) return [];
  const found = [], work = base.stages.map((stage) => stage.graph + stage.backward);
  const slowest = work.indexOf(greatest(work)), all = 2 * base.rows.flat().length * base.balance.length < MOST_TRIED;
  base.balance.slice(0, -1).forEach((_, stage) => {
    if (!all && stage !== slowest && stage + 1 !== slowest) return; // so many would take seconds
    const end = boundsOf(base.balance)[stage][1];
    for (const [from, to, layer] of [[stage, stage + 1, end - 1], [stage + 1, stage, end]]) {
      const balance = base.balance.map((size, k) => size + (k === to) - (k === from));
      if (balance[from] < 1) continue;
      const moved = configured(data, {...controls, balance, rows: base.rows});
      if (moved.problem) continue;
      found.push({from_stage: from, to_stage: to, layer, balance, step_seconds: moved.step_seconds});
    }
  });
  return found.sort((a, b) => a.step_seconds - b.step_seconds);
}

window.gpipe = {
  action, key, greatest, microBatches, sources, order, withRecomputation, fewestRecomputations, check, linearize, csv,
  stagesOf, clock, SCHEDULES, MADE_FOR, AS_PLANNED, placed, rowsOfDevices, settled,
  simulate, breakdown, idleRegions, memory, peakWaiting, critical, lastTransfer, held, layerCosts, microBatchSizes,
  slowdowns, partition, crossing, skipBytes, ownControls, configured, bubbles, moves,
};
