// The lanes: figures under each other on one time axis, as SVG. A figure is built once; panning and zooming change only
// positions and widths.
const SVG = "http://www.w3.org/2000/svg";
const field = id => document.getElementById(id);
const svg = field("lanes");
const HEADER = 24, AXIS = 24, GAP = 14, DEVICE = 17, RIGHT = 14;
const MAX_BARS = 8000; // of a figure; more are not drawn
const view = {start: 0, seconds: 1, width: 800, left: 84}; // the visible part of the time axis, and its place in pixels
const drawn = new Map(); // kind of a figure -> its elements
let layers; // the groups of the picture: ticks, figures, highlights, play head

function make(name, attributes, parent, text) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  if (parent) parent.append(node);
  return node;
}

// The colour of an action, from palette.py: the hue is the micro-batch, the lightness the kind of action.
function colour(kind, microBatch, microBatches) {
  const hues = data.colours[kind];
  return hues[Math.round(microBatch / Math.max(1, microBatches - 1) * (hues.length - 1))];
}

// A timeline with indexes for sentences and arrows: spans by name, by device, and the span before each. `joined`: whether
// a device has one lane for all of its stages, as they are not adjacent and micro-batches return to it.
function figureOf(kind, timeline, parts) {
  const device_of_stage = timeline.device_of_stage?.length ? timeline.device_of_stage
    : timeline.spans.map((_, stage) => stage);
  const spanOf = new Map(), beforeOnDevice = new Map(), ofDevice = new Map();
  [...new Set(device_of_stage)].sort((a, b) => a - b).forEach(device => ofDevice.set(device, []));
  timeline.spans.forEach((spans, stage) => {
    for (const span of spans) {
      spanOf.set(gpipe.key(span.action), span);
      ofDevice.get(device_of_stage[stage]).push(span);
    }
  });
  for (const spans of ofDevice.values()) {
    spans.sort((a, b) => a.start - b.start);
    spans.forEach((span, at) => at && beforeOnDevice.set(span, spans[at - 1]));
  }
  const large = spanOf.size > MAX_BARS, last = new Map();
  const joined = device_of_stage.some((device, stage) => {
    const again = last.has(device) && last.get(device) !== stage - 1;
    last.set(device, stage);
    return again;
  });
  const sourceOf = gpipe.sources(timeline.spans.map(spans => spans.map(span => span.action)));
  return {kind, timeline, device_of_stage, joined, large, spanOf, sourceOf, beforeOnDevice, ofDevice, ...parts};
}

function stagesOn(figure, device) {
  return figure.device_of_stage.flatMap((of, stage) => of === device ? [stage] : []);
}

function startPicture() {
  const defs = make("defs", {}, svg);
  const pattern = (id, side, degrees, ground, ...shapes) => {
    const node = make("pattern", {id, width: side, height: side, patternUnits: "userSpaceOnUse",
                                  patternTransform: `rotate(${degrees})`}, defs);
    make("path", {d: `M0 0H${side}V${side}H0z`, fill: ground}, node);
    shapes.forEach(([name, attributes]) => make(name, attributes, node));
  };
  const hatch = ["path", {d: "M0 0V6", stroke: "var(--line)", "stroke-width": 1.6}];
  pattern("idle", 6, -45, "var(--idle)", hatch);
  pattern("bubble", 6, -45, "var(--waiting)", ["path", {d: "M0 0V6", stroke: "var(--transfer)", "stroke-width": 1}]);
  pattern("imbalance", 6, 0, "var(--waiting)", ["circle", {cx: 3, cy: 3, r: 1.1, fill: "var(--transfer)"}]);
  pattern("transfer", 4, 45, "var(--paper)",
          ["path", {d: "M0 0V4M0 0H4", stroke: "var(--transfer)", "stroke-width": 2.2}]);
  const marker = make("marker", {id: "point", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 8, markerHeight: 8,
                                 markerUnits: "userSpaceOnUse", orient: "auto"}, defs);
  make("path", {d: "M0 0L8 4L0 8z", class: "point"}, marker);
  const plot = make("clipPath", {id: "plot"}, defs);
  make("rect", {y: -10000, height: 20000}, plot);
  layers = {plot: plot.firstChild};
  for (const name of ["ticks", "figures", "pointed", "head"]) layers[name] = make("g", {class: name}, svg);
  for (const name of ["ticks", "pointed", "head"]) layers[name].setAttribute("pointer-events", "none");
}

// Replaces the figure of a kind, or removes it.
function show(kind, figure) {
  drawn.get(kind)?.group.remove();
  drawn.delete(kind);
  if (figure) drawn.set(kind, build(figure));
}

// The height of a bar and of a memory curve: lower where there are many rows.
function heights(stages) {
  return stages <= 8 ? [26, 30] : stages <= 16 ? [20, 22] : [14, 14];
}

function build(figure) {
  const group = make("g", {class: `figure ${figure.kind}`, role: "group", "aria-label": `${figure.kind} timeline`},
                     layers.figures);
  const result = {figure, group, items: [], bars: new Map(), lanes: [], rows: [], wide: view.width >= 720};
  const title = make("text", {class: "about", x: 2, y: 12}, group);
  make("tspan", {class: "kind"}, title, figure.kind);
  make("tspan", {dx: 10}, title, figure.about);
  const ends = `step ${duration(figure.step_seconds)}, idle ${percent(idleShare(figure))}`;
  result.ends = make("text", {class: "ends", y: result.wide ? 12 : 29}, group, ends);
  let top = HEADER + (result.wide ? 0 : 17);
  if (figure.large) {
    title.append(`, ${figure.spanOf.size.toLocaleString("en")} actions: too many to draw`);
    result.height = top;
    return result;
  }
  const {joined} = figure, shared = figure.ofDevice.size < figure.device_of_stage.length;
  const lanes = joined ? figure.ofDevice.size : figure.device_of_stage.length;
  const [bar, curve] = figure.kind === "K = 1" ? [18, 0] : heights(lanes);
  const memory = figure.memory && state.memory ? curve : 0;
  for (const device of figure.ofDevice.keys()) {
    const stages = stagesOn(figure, device), first = top + DEVICE;
    if (shared && !joined) {
      make("text", {class: "device", x: 2, y: top + 9}, group, deviceTitle(device, stages));
      top = first;
    }
    for (const of of joined ? [stages] : stages.map(stage => [stage])) top = buildLane(result, device, of, top, bar);
    if (memory) top = buildMemory(result, device, top, memory);
    if (shared && !joined) make("path", {class: "floor", d: `M3 ${first}V${top - 5}`}, group);
  }
  result.height = top;
  addEnds(result);
  return result;
}

function deviceTitle(device, stages) {
  return stages.length > 1 ? `device ${device}: stages ${list(stages)} take turns` : `device ${device}`;
}

function idleShare(figure) {
  return IDLE.reduce((sum, name) => sum + figure.breakdown[name], 0);
}

// A lane shows one stage, or all stages of a device.
function buildLane(result, device, stages, top, bar) {
  const {figure, group} = result, several = stages.length > 1, y = top + bar / 2;
  const name = figure.kind === "K = 1" ? "all layers" : figure.joined ? `device ${device}` : `stage ${stages[0]}`;
  const node = make("g", {class: "stage", role: "group", "aria-label": laneWord(figure, stages[0])}, group);
  const two = several && bar >= 26, x = view.left - 8;
  const label = make("text", {class: "name", x, y: two ? y - 6 : y}, node, name);
  label.piece = {figure, what: "stage", stage: stages[0]};
  if (two) {
    const all = stages.join(", "), fits = [`stages ${all}`, all].find(text => text.length * 6.2 < x);
    make("text", {class: "small", x, y: y + 7}, node, fits ?? `${stages.length} stages`);
  }
  const plot = make("g", {"clip-path": "url(#plot)"}, node), lane = {device, stages, top, bar, node, plot};
  lane.spans = several ? figure.ofDevice.get(device) : figure.timeline.spans[stages[0]];
  result.lanes.push(lane);
  for (const stage of stages) result.rows[stage] = lane;
  const room = {y: top, height: bar};
  const taken = !figure.joined && figure.ofDevice.size < figure.device_of_stage.length; // it may run another stage
  addBox(result, plot, {...room, class: taken ? "other" : "idle"}, 0, figure.step_seconds);
  const regions = figure.regions.get(device);
  for (const region of regions) {
    const box = addBox(result, plot, {...room, class: `region ${region.why}`}, region.start, region.end);
    box.piece = {figure, what: "region", stage: stages[0], region: {...region, device}};
  }
  for (const region of regions) {
    const word = shareWord(region.why);
    addText(result, plot, [`${word} ${duration(region.end - region.start)}`, word], region, y, "region");
  }
  for (const stage of stages) {
    for (const event of figure.timeline.events[stage].filter(event => event.what === "update")) {
      const box = addBox(result, plot, {...barOf(lane, stage), class: "bar update"}, event.start, event.end);
      box.piece = {figure, what: "event", stage, event: {...event, stage}};
      addText(result, plot, ["update"], event, y, "on update");
    }
  }
  for (const span of lane.spans) addAction(result, plot, span, lane);
  return top + bar + 4;
}

// The place of a stage's bars in its lane: each later stage is lower, which in a V shows the way down and back up.
function barOf({stages, top, bar}, stage) {
  if (stages.length < 2) return {y: top, height: bar};
  const way = Math.round(bar / 4);
  return {y: top + way * stages.indexOf(stage) / (stages.length - 1), height: bar - way};
}

function addBox(result, parent, attributes, start, end) {
  const node = make("rect", attributes, parent);
  result.items.push({node, start: Math.max(0, start), end, box: true});
  return node;
}

// Shows the longest of some texts that fits between two times.
function addText(result, parent, texts, {start, end}, y, name) {
  const node = make("text", {class: name, y: y + 0.5}, parent);
  result.items.push({node, start: Math.max(0, start), end, texts});
  return node;
}

function addAction(result, plot, span, lane) {
  const {figure} = result, {action} = span, key = gpipe.key(action), {y, height} = barOf(lane, action.stage);
  const fill = colour(action.kind, action.micro_batch, figure.micro_batches);
  const attributes = {y, height, fill, class: `bar action ${action.kind}`, role: "img", tabindex: -1,
                      "data-key": key, "aria-label": actionLabel(figure, span)};
  if (action.kind === "R") attributes.style = `stroke:${colour("F", action.micro_batch, figure.micro_batches)}`;
  const node = addBox(result, plot, attributes, span.start, span.end);
  node.piece = {figure, what: "action", stage: action.stage, span};
  const texts = [...lane.stages.length > 1 ? [key] : [], action.kind + action.micro_batch, action.kind];
  const text = addText(result, plot, texts, span, y + height / 2, `on ${action.kind}`);
  result.bars.set(key, {node, text, span});
}

function actionLabel(figure, {action, start, end}) {
  const {kind, stage, micro_batch} = action;
  return `${gpipe.key(action)}, ${KIND_WORDS[kind]} of micro-batch ${micro_batch} on ${stageWord(figure, stage)}, ` +
    `${duration(start)} to ${duration(end)}`;
}

// The limit of a stage that is drawn: a limit far above is only in the text.
function shownLimit(figure) {
  const most = Math.max(...devicesMemory(figure).map(([device, of]) => peak(of) / stagesOn(figure, device).length));
  return figure.limit_bytes && figure.limit_bytes < 2.5 * most ? figure.limit_bytes : 0;
}

// [device, bytes held by all of its stages]
function devicesMemory(figure) {
  return [...figure.ofDevice.keys()].map(device => [device, figure.device_memory[device]]);
}

// The bytes at the top of all memory curves, the same for every device.
function memoryTop(figure) {
  const limit = shownLimit(figure);
  return 1.04 * Math.max(...devicesMemory(figure).flatMap(([device, of]) =>
    [peak(of), limit * stagesOn(figure, device).length]));
}

function peak({weights, gradients, optimizer, buffers, workspace, held}) {
  return weights + gradients + optimizer + buffers + workspace + gpipe.maxOf(held, 0);
}

function fullestPeak({device_memory}) {
  return Math.max(...device_memory.map(peak));
}

// A device's memory over time, stacked: weights, gradients with optimizer state, buffers and workspace, activations.
function buildMemory(result, device, top, height) {
  const {figure} = result, {weights, gradients, optimizer, buffers, workspace, held} = figure.device_memory[device];
  const stages = stagesOn(figure, device), {node, plot} = result.rows[stages.at(-1)], most = memoryTop(figure);
  const at = bytes => top + height - height * bytes / most;
  const middle = {x: view.left - 8, y: top + height / 2};
  const text = make("text", {class: "small", ...middle}, node, size(peak(figure.device_memory[device])));
  text.piece = {figure, what: "memory", stage: stages[0]};
  const end = figure.step_seconds;
  let below = 0;
  for (const [name, bytes] of [["weights", weights], ["state", gradients + optimizer],
    ["space", buffers + workspace]]) {
    addBox(result, plot, {class: name, y: at(below + bytes), height: at(below) - at(below + bytes)}, 0, end);
    below += bytes;
  }
  const curve = make("path", {class: "held", d: heldPath(figure.ofDevice.get(device), held, below, at)}, plot);
  result.items.push({node: curve, curve: true});
  make("path", {class: "floor", d: `M${view.left} ${top + height}H9999`}, plot);
  if (shownLimit(figure)) {
    make("path", {class: "limit", d: `M${view.left} ${at(figure.limit_bytes * stages.length)}H9999`}, plot);
  }
  const cover = addBox(result, plot, {y: top, height, fill: "transparent"}, 0, end);
  cover.piece = {figure, what: "memory", stage: stages[0]};
  return top + height + 6;
}

// The bytes of running actions are known; between two, the first's are freed and the second's not yet allocated.
function heldPath(spans, held, below, at) {
  if (!spans.length) return "";
  let path = `M${spans[0].start} ${at(below)}`;
  spans.forEach((span, n) => {
    const between = n + 1 < spans.length ? Math.min(held[n], held[n + 1]) : 0;
    path += `L${span.start} ${at(below + held[n])}H${span.end}V${at(below + between)}`;
    if (n + 1 < spans.length) path += `H${spans[n + 1].start}`;
  });
  return `${path}z`;
}

// Marks the end of a step, and for the simulated step also the original setting's.
function addEnds(result) {
  const {figure, group} = result;
  const plot = make("g", {"clip-path": "url(#plot)", "pointer-events": "none"}, group);
  const top = HEADER + (result.wide ? -2 : 15); // below the text at the right
  const line = (seconds, name) => {
    const node = make("path", {class: name}, plot);
    result.items.push({node, at: seconds, top, bottom: result.height - 3});
  };
  line(figure.step_seconds, "end");
  if (figure.original_seconds && Math.abs(figure.original_seconds / figure.step_seconds - 1) > 1e-3) {
    line(figure.original_seconds, "ownend");
    const text = make("text", {class: "small own", y: result.height + 4}, plot, `the ${owner()}'s own setting`);
    result.items.push({node: text, original: figure.original_seconds});
  }
  result.more = make("text", {class: "ends more", y: HEADER + 9}, group);
}

// The width of the picture. Measuring it makes a browser lay out the whole page: not while a slider is dragged.
function measureWidth() {
  view.width = Math.max(280, svg.parentNode.clientWidth);
  view.left = view.width < 560 ? 66 : 80;
}

// Sets height and places of the figures, then their times.
function layOut() {
  let top = AXIS;
  for (const kind of ["measured", "simulated", "K = 1"]) {
    const one = drawn.get(kind);
    if (!one) continue;
    one.top = top;
    one.group.setAttribute("transform", `translate(0 ${top})`);
    one.ends.setAttribute("x", view.width - RIGHT);
    layers.figures.append(one.group);
    top += one.height + GAP;
  }
  view.height = top + AXIS;
  svg.setAttribute("height", view.height);
  svg.setAttribute("width", view.width);
  layers.plot.setAttribute("x", view.left);
  layers.plot.setAttribute("width", plotWidth());
  place();
}

function plotWidth() {
  return view.width - view.left - RIGHT;
}

function xOf(seconds) {
  return view.left + (seconds - view.start) * plotWidth() / view.seconds;
}

function timeOf(x) {
  return view.start + (x - view.left) * view.seconds / plotWidth();
}

let placing = 0;
function requestPlace() {
  if (!placing) placing = requestAnimationFrame(place);
}

// Redraws what depends on the visible part of the time axis.
function place() {
  cancelAnimationFrame(placing);
  placing = 0;
  placeTicks();
  const right = view.width - RIGHT;
  for (const one of drawn.values()) {
    for (const item of one.items) placeItem(item, one, right);
    if (one.more) placeMore(one, right);
  }
  placePointed();
}

function placeItem(item, one, right) {
  const {node} = item;
  if (item.curve) {
    const scale = plotWidth() / view.seconds;
    node.setAttribute("transform", `translate(${view.left - view.start * scale} 0) scale(${scale} 1)`);
  } else if (item.original !== undefined) {
    node.setAttribute("x", Math.max(view.left + 68, Math.min(xOf(item.original), right - 68))); // its text is up to 136 wide
  } else if (item.at !== undefined) {
    node.setAttribute("d", `M${xOf(item.at).toFixed(1)} ${item.top}V${item.bottom}`);
  } else {
    const from = xOf(item.start), to = xOf(item.end);
    const seen = to >= view.left && from <= right;
    if (item.texts) placeText(item, Math.max(from, view.left), Math.min(to, right), seen);
    else if (seen || item.shown !== false) {
      node.setAttribute("x", Math.max(from, view.left - 50).toFixed(2));
      node.setAttribute("width", Math.max(0, Math.min(to, right + 50) - Math.max(from, view.left - 50)).toFixed(2));
      item.shown = seen;
    }
  }
}

function placeText(item, from, to, seen) {
  const text = seen ? item.texts.find(text => text.length * 6.9 + 4 < to - from) : undefined;
  if (text !== item.text) {
    item.node.textContent = text ?? "";
    item.text = text;
  }
  if (text) item.node.setAttribute("x", ((from + to) / 2).toFixed(1));
}

// Marks steps that extend past the right edge.
function placeMore(one, right) {
  const beyond = one.figure.step_seconds > timeOf(right) + NEAR && one.figure.kind === "K = 1";
  one.more.textContent = beyond ? `continues until ${duration(one.figure.step_seconds)} \u2192` : "";
  one.more.setAttribute("x", right);
  one.more.setAttribute("y", 12);
  one.ends.setAttribute("visibility", beyond && one.wide ? "hidden" : "visible");
}

function placeTicks() {
  layers.ticks.replaceChildren();
  const end = view.start + view.seconds, step = tickStep(view.seconds);
  const [name, unit] = end >= 2 ? ["s", 1] : end >= 2e-3 ? ["ms", 1e-3] : ["\u00b5s", 1e-6];
  const digits = Math.max(0, -Math.floor(Math.log10(step / unit) + 1e-9));
  let first = true;
  for (let n = Math.ceil(view.start / step - 1e-9); n * step <= end * (1 + 1e-12); n++) {
    const x = xOf(n * step).toFixed(1);
    make("path", {class: "tick", d: `M${x} ${AXIS - 5}V${view.height - AXIS + 2}`}, layers.ticks);
    const text = (n * step / unit).toFixed(digits) + (first ? ` ${name}` : "");
    first = false;
    for (const y of [9, view.height - 11]) make("text", {class: "time", x, y}, layers.ticks, text);
  }
}

// Ticks at round times, about one per 100 pixels.
function tickStep(seconds) {
  const most = seconds * 90 / plotWidth(), power = 10 ** Math.floor(Math.log10(most));
  return [1, 2, 5, 10].map(n => n * power).find(step => step >= most * 0.999);
}

// The middle of a stage's bars, in the picture.
function laneY(kind, stage, part = 0.5) {
  const one = drawn.get(kind), {y, height} = barOf(one.rows[stage], stage);
  return one.top + y + height * part;
}
