// The front page: the scenes of its text, drawn as one scrolls. The steps are simulated by the explorer's engine, and
// drawn by its lanes.
const data = JSON.parse(field("data").textContent);
const LAYERS = 8, FORWARD = 4, BACKWARD = 8; // seconds of the whole mini-batch, all layers
const START = 0.03, UPDATE = 0.1; // seconds: of each action, sending included, and of all weights
const GIB = 2 ** 30, WEIGHTS = 1, ACTIVATIONS = 1.5, INPUT = 0.25, LIMIT = 6; // GiB: of a layer, of all M inputs, a device
const NARROW = 560; // pixels of a picture that has no room for a comparison
const WAIT = 0.55; // share of the window's height at which a beat begins to move
const KEY_SECONDS = 2.5; // until the next beat has been drawn
const state = {memory: true, figure: null, asItRan: null};
const own = {K: 2, M: 4, schedule: "gpipe", recompute: "never"};
const beats = [...document.querySelectorAll(".beat")];
const still = matchMedia("(prefers-reduced-motion: reduce)");
let shown = null, revealed = 1, keyed = 0, opening = 0; // share of the first picture that is drawn

// One step: `K` equal stages, `M` equal micro-batches.
function simulated({K, M, schedule = "gpipe", recompute = "never"}) {
  const [forward, backward] = [FORWARD, BACKWARD].map(seconds => seconds / K / M + START);
  const stages = range(K, () => ({forward, graph: forward, backward, inputs: backward / 2, weights: backward / 2,
    update: UPDATE / K, sum: 0}));
  const rows = gpipe.withRecomputation(gpipe.order(schedule, K, M), recompute), device_of_stage = range(K);
  const timeline = gpipe.simulate(rows, {stages, device_of_stage}), step_seconds = endOf(timeline);
  const input = INPUT * GIB / M, graph = input + ACTIVATIONS * GIB * LAYERS / K / M;
  const sizes = range(M, () => ({graph, input, gradients: 0, weights: graph}));
  const device_memory = rows.map(row => ({weights: WEIGHTS * GIB * LAYERS / K, gradients: 0, optimizer: 0, buffers: 0,
    workspace: 0, held: gpipe.memory(row, sizes)}));
  const about = `K = ${K}, M = ${M}, ${schedule}${recompute === "never" ? "" : ", recomputation"}`;
  return figureOf("simulated", timeline, {
    step_seconds, breakdown: gpipe.breakdown(timeline, M, step_seconds), micro_batches: M, about, rows, stages,
    regions: new Map(gpipe.idleRegions(timeline, M, step_seconds)), balance: range(K, () => LAYERS / K),
    device_memory, memory: device_memory, limit_bytes: LIMIT * GIB,
  });
}

const FACTS = {
  step: figure => duration(figure.step_seconds),
  idle: figure => percent(idleShare(figure)),
  memory: figure => size(fullestPeak(figure)),
  faster: figure => `${(state.asItRan.step_seconds / figure.step_seconds).toFixed(2)} \u00d7`,
};
const NAMES = {step: "time of a step", idle: "devices idle", memory: "memory, fullest device",
  faster: "speed, one device: 1"};

function settingOf(beat) {
  return beat.dataset.setting === "own" ? own : JSON.parse(beat.dataset.setting);
}

// ---- the picture ----

function showBeat(beat) {
  shown = beat;
  const figure = state.figure = simulated(settingOf(beat)), over = fullestPeak(figure) > LIMIT * GIB;
  measureWidth();
  svg.classList.toggle("many", figure.micro_batches > 32); // white rims would leave little of the colours
  show("simulated", figure);
  show("K = 1", figure.ofDevice.size > 1 && view.width >= NARROW ? state.asItRan : null);
  view.start = 0;
  view.seconds = 1.02 * Math.max(figure.step_seconds, state.asItRan.step_seconds);
  const facts = field("facts");
  facts.replaceChildren();
  for (const [name, fact] of Object.entries(FACTS)) {
    const group = facts.appendChild(document.createElement("div"));
    group.appendChild(document.createElement("dt")).textContent = NAMES[name];
    group.appendChild(document.createElement("dd")).textContent = fact(figure);
  }
  field("warning").textContent = over ? `Over the ${LIMIT} GiB of a device: this does not fit.` : "";
  layOut();
}

// Called by the lanes: draws the play head at the end of the picture.
function placePointed() {
  const x = xOf(revealed * view.seconds), end = view.width - RIGHT;
  layers.plot.setAttribute("width", Math.max(0, Math.min(x, end) - view.left));
  layers.head.replaceChildren();
  if (revealed < 1) make("path", {class: "head", d: `M${x} ${AXIS - 6}V${view.height - AXIS + 4}`}, layers.head);
}

// The height in the window at which a beat begins to move: on a phone the picture covers the upper half.
function beginsAt() {
  return view.width < innerWidth * 0.7 ? WAIT : 0.85;
}

// The scrolling distance over which a beat is drawn: on a phone until its heading is below the picture.
function way(height) {
  if (beginsAt() === WAIT) return Math.min(height * 0.75, innerHeight * 0.5);
  return Math.max(60, innerHeight * beginsAt() - field("stage").offsetHeight);
}

// The beat that is being read, and the fraction of its picture that is drawn.
function follow() {
  const line = innerHeight * beginsAt(), top = beat => beat.getBoundingClientRect().top;
  const beat = beats.findLast(one => top(one) < line + 1) ?? beats[0];
  const {height} = beat.getBoundingClientRect();
  const whole = still.matches || beat.dataset.setting === "own";
  revealed = beat === beats[0] ? opening : whole ? 1 : Math.min(1, (line - top(beat)) / way(height));
  if (beat !== shown) showBeat(beat);
  else placePointed();
}

let following = 0;
function requestFollow() {
  if (!following) following = requestAnimationFrame(() => {
    following = 0;
    follow();
  });
}

// ---- keys: scroll to the next beat or back ----

function goTo(beat) {
  const begin = scrollY, {top, height} = beat.getBoundingClientRect();
  const room = way(height) + 2;
  const end = begin + top - innerHeight * beginsAt() + room, since = performance.now(), mine = ++keyed;
  const move = now => {
    if (mine !== keyed) return;
    const part = still.matches ? 1 : Math.min(1, (now - since) / 1000 / KEY_SECONDS);
    scrollTo({top: begin + (end - begin) * part, behavior: "instant"});
    if (part < 1) requestAnimationFrame(move);
  };
  requestAnimationFrame(move);
}

function onSceneKey(event) {
  const way = {ArrowRight: 1, ArrowLeft: -1}[event.key];
  if (!way || event.altKey || event.ctrlKey || event.metaKey || /^(SELECT|INPUT)$/.test(event.target.tagName)) return;
  const beat = beats[beats.indexOf(shown) + way];
  if (!beat && way < 0) return;
  event.preventDefault();
  if (beat) goTo(beat);
  else field("slower").scrollIntoView({behavior: still.matches ? "instant" : "smooth"});
}

// ---- your turn ----

function startOwn() {
  for (const name of Object.keys(own)) {
    field(name).value = own[name];
    field(name).addEventListener("change", event => {
      own[name] = typeof own[name] === "number" ? Number(event.target.value) : event.target.value;
      showBeat(beats.at(-1));
      revealed = 1;
      placePointed();
    });
  }
}

function start() {
  state.asItRan = {...simulated({K: 1, M: 1}), kind: "K = 1", about: "one device, for comparison"};
  startPicture();
  startTheme();
  for (const node of document.querySelectorAll("output[data-fact]")) {
    const {of} = node.dataset, setting = of ? JSON.parse(of) : settingOf(node.closest(".beat"));
    node.textContent = FACTS[node.dataset.fact](simulated(setting));
  }
  for (const [name, text] of Object.entries(GLOSSARY)) {
    if (["1F0", "skip", "placement"].includes(name)) continue; // of the explorer
    field("words").appendChild(document.createElement("dt")).textContent = name;
    field("words").appendChild(document.createElement("dd")).textContent = text;
  }
  startOwn();
  showKey();
  showBeat(beats[0]);
  drawFirst();
  addEventListener("scroll", requestFollow, {passive: true});
  for (const what of ["wheel", "touchstart", "pointerdown"]) addEventListener(what, () => ++keyed, {passive: true});
  addEventListener("resize", () => showBeat(shown));
  addEventListener("keydown", onSceneKey);
}

// The first picture is drawn as the page opens.
function drawFirst(since = performance.now()) {
  opening = still.matches ? 1 : Math.min(1, (performance.now() - since) / 1000 / KEY_SECONDS);
  follow();
  if (opening < 1) requestAnimationFrame(() => drawFirst(since));
}

// The legend of letters and patterns.
function showKey() {
  const entry = (mark, text) => {
    const node = field("key").appendChild(document.createElement("span"));
    node.append(mark, text);
  };
  for (const kind of ["F", "B", "R"]) {
    const mark = document.createElement("i");
    mark.style.background = `linear-gradient(90deg,${range(5, m => colour(kind, m, 5)).join(",")})`;
    entry(mark, `${kind} ${KIND_WORDS[kind]}`);
  }
  for (const [name, text] of [["bubble", "idle"], ["weights", "weights"], ["held", "activations"], ["limit", "memory limit"]]) {
    const mark = make("svg", {viewBox: "0 0 30 14"});
    make("path", {class: name, d: name === "limit" ? "M0 7H30" : "M0 0H30V14H0z"}, mark);
    entry(mark, text);
  }
}

start();
