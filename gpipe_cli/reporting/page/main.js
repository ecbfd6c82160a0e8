// The page: its data, its state, and what follows when the state changes.
const data = JSON.parse(field("data").textContent);
const state = {
  own: null, // the controls of the run's own setting
  controls: null, // those that are simulated
  history: [], // those before, for undo
  figure: null, // what is simulated; of an order that cannot run the last one that could
  asItRan: null, onOwnDevices: null, // the run's own setting, simulated
  ownFigure: null, oneFigure: null, // of these two the one that others are compared with; and K = 1
  problem: null, // why the controls cannot be, in one line
  stale: false, // figure is not of these controls: they have none
  recorded: 0, // number of the measured step that is shown
  pointed: null, // what the pointer or the focus is on
  time: null, playing: false, dragging: false, // of the play head and the pointer
  sliding: false, // a slider is being dragged
  critical: false, memory: true, one: true, // what is shown beside the lanes
  move: null, // the cut with the best layer moved
};

function simulatedFigure(kind, result, controls, about) {
  const M = controls.micro_batches, {timeline, step_seconds} = result;
  const regions = new Map(gpipe.idleRegions(timeline, M, step_seconds));
  return figureOf(kind, timeline, {...result, micro_batches: M, about, regions});
}

const HINT = field("explained").textContent;

// A recorded step as the simulator would give it.
function measuredFigure() {
  const step = data.steps[state.recorded];
  if (!step?.stages.length) return null;
  const spans = step.stages.map((bars, stage) => bars.map(([kind, micro_batch, start, end]) =>
    ({action: {kind, stage, micro_batch}, start: Math.max(0, start), end})));
  const events = step.events.map((bars, stage) => bars.map(([what, micro_batch, start, end]) => {
    const next = micro_batch === null ? undefined
      : spans[stage].find(span => span.action.micro_batch === micro_batch && span.start >= end - 1e-6);
    return {what, start, end, action: next?.action ?? null};
  }));
  const timeline = {spans, events, device_of_stage: data.device_of_stage};
  const M = gpipe.microBatches(timeline.spans.map(row => row.map(span => span.action))); // fewer, in a short last step
  return figureOf("measured", timeline, {
    step_seconds: step.step_seconds, breakdown: step.breakdown, micro_batches: M, balance: data.balance,
    regions: new Map(gpipe.idleRegions(timeline, M, step.step_seconds)),
    about: `epoch ${step.epoch}, step ${step.step.toLocaleString("en")}` +
      (step.median_of > 1 ? `, the median of ${step.median_of.toLocaleString("en")} steps` : ""),
  });
}

function aboutControls(controls) {
  const short = `K = ${controls.partitions}, M = ${controls.micro_batches}`;
  if (view.width < 720) return short;
  const {placement, stages_per_process} = gpipe.settled(data, controls);
  const placed = stages_per_process > 1 && stages_per_process < controls.partitions ? ` (${placement})` : "";
  const order = (controls.rows ? "order by hand" : controls.schedule) + placed;
  return `${short}, ${order}, recompute ${controls.recompute}${controls.own_devices ? ", own devices" : ""}`;
}

function showMeasured() {
  const step = data.steps[state.recorded];
  show("measured", measuredFigure());
  field("scrub").hidden = data.steps.length < 2;
  field("contended").hidden = !data.contended;
  field("contended").textContent = `Other programs used these cores for ${percent(data.contended)} of the time while ` +
    "the run was measured: its times are longer than they would be alone. Run again on a quiet machine, or measure " +
    "with gpipe bench.";
  field("recorded").max = data.steps.length - 1;
  field("recorded").value = state.recorded;
  const left = data.steps_left_out ? `; ${data.steps_left_out} older ones are not in this page` : "";
  field("recorded-value").textContent = step
    ? `epoch ${step.epoch}, step ${step.step.toLocaleString("en")}: ${duration(step.step_seconds)}` +
      ` (${state.recorded + 1} of ${data.steps.length}${left})` : "";
  field("recorded").setAttribute("aria-valuetext", field("recorded-value").textContent);
  field("recorded-picture").hidden = !step?.picture;
  if (step?.picture) field("recorded-picture").src = step.picture;
}

function oneControls(controls) {
  return {...controls, partitions: 1, stages_per_process: 1, schedule: "gpipe", balance: undefined, rows: undefined};
}

// Simulates the controls and draws everything that follows from them.
function update() {
  const {controls} = state;
  const result = gpipe.configured(data, controls), wrong = result.faulty ?? null;
  state.ownFigure = controls.own_devices && explored(controls) ? state.onOwnDevices : state.asItRan;
  state.problem = result.problem ?? null;
  state.stale = !result.timeline;
  if (result.timeline) {
    state.figure = simulatedFigure("simulated", result, controls, aboutControls(controls));
    state.figure.own_seconds = state.ownFigure.step_seconds;
  }
  const one = oneControls(controls);
  state.oneFigure = simulatedFigure("K = 1", gpipe.configured(data, one), one, "the whole model on one device");
  showSimulated(result, wrong);
  showControls();
  showProblem(result, wrong);
  showNumbers();
  showShares();
  showOrder();
  showMoves();
  showLegend();
  showCurve();
  field("costs").textContent = costsInWords();
  const changed = changes();
  if (!state.pointed) explained.textContent = state.stale ? "" : changed.length ? changeInWords() : HINT;
  field("changed").textContent = changed.length ? `Changed: ${changed.join("; ")}.`
    : `This is the ${owner()}'s own setting.`;
  if (!state.sliding) writeAddress();
  if (view.fitted) fit();
  layOut();
}

function showSimulated(result, wrong) {
  const pointed = state.pointed?.figure.kind !== "measured" && state.pointed?.span;
  if (state.pointed?.figure.kind !== "measured") state.pointed = null;
  show("simulated", wrong ? orderFigure(result) : state.figure);
  drawn.get("simulated").group.classList.toggle("stale", state.stale && !wrong);
  show("K = 1", state.one && state.controls.partitions > 1 ? state.oneFigure : null);
  const again = pointed && drawn.get("simulated").bars.get(gpipe.key(pointed.action));
  if (again && svg.querySelector(".action:focus")) pointAt(again.node.piece);
  if (!svg.querySelector('.action[tabindex="0"]')) svg.querySelector(".simulated .action")?.setAttribute("tabindex", 0);
}

function showProblem(result, wrong) {
  const box = field("problem");
  box.hidden = !state.problem;
  box.replaceChildren();
  if (!state.problem) return;
  const title = document.createElement("b");
  title.textContent = wrong ? "This order cannot run. " : result.timeline ? "This does not fit. " : "This cannot be. ";
  box.append(title, `${state.problem}. `);
  if (wrong) box.append("The actions in question have a red rim. ");
  if (wrong?.waits.length > 1) {
    box.append("Arrows go to what they wait for, in a circle: none can ever start. ");
    if (wrong.waits.length < 9) box.append(capital(deadlockInWords(drawn.get("simulated").figure, wrong.waits)));
  }
  if (!result.timeline) box.append("Numbers are those of the last setting that could run. ");
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = "undo";
  button.addEventListener("click", undo);
  if (state.history.length) box.append(button);
}

function showLegend() {
  const M = state.figure.micro_batches, legend = field("legend");
  const kinds = new Set([...drawn.values()].flatMap(one => [...one.bars.values()].map(bar => bar.span.action.kind)));
  legend.replaceChildren();
  const entry = (mark, text) => {
    const node = legend.appendChild(document.createElement("span"));
    node.append(mark, text);
  };
  for (const kind of Object.keys(KIND_WORDS).filter(kind => kinds.has(kind))) {
    const colours = Array.from({length: M}, (_, m) => colour(kind, m, M)), mark = document.createElement("i");
    mark.style.background = `linear-gradient(90deg,${(M > 1 ? colours : [...colours, ...colours]).join(",")})`;
    entry(mark, `${kind} ${KIND_WORDS[kind]}`);
  }
  entry("", `left: micro-batch 0, right: ${M - 1}`);
  if (state.figure.joined) entry("", "2F0: of stage 2; the later of a device's stages are lower");
  const marks = [...IDLE.map(name => [name, shareWord(name)]), ["update", "weight update"]];
  if (state.memory) {
    marks.push(["weights", "weights"], ["state", "gradients, optimizer"], ["space", "buffers, work space"]);
    marks.push(["held", "activations"]);
    if (shownLimit(state.figure)) marks.push(["limit", "memory limit"]);
  }
  if (state.figure.skips.length) marks.push(["skip", "skips of micro-batch 0, or of the one pointed at"]);
  for (const [name, text] of marks) {
    const line = ["limit", "skip"].includes(name);
    const mark = make("svg", {viewBox: "0 0 30 14", "aria-hidden": true});
    make("path", {class: name, d: line ? "M0 7H30" : "M0 0H30V14H0z"}, mark);
    entry(mark, text);
  }
}

// All figures anew, for another width or with other parts.
function redraw() {
  takeWidth();
  showMeasured();
  update();
}

function start() {
  document.title = `${data.title}: pipeline`;
  field("title").textContent = data.title;
  field("subject").textContent = [data.run, data.commands.at(-1)].filter(Boolean).join(" \u00b7 ");
  state.own = gpipe.ownControls(data);
  state.recorded = Math.max(0, data.steps.length - 1);
  startPicture();
  startControls();
  field("own").textContent = `the ${owner()}'s own setting`;
  [state.asItRan, state.onOwnDevices] = [false, true].map(own_devices =>
    simulatedFigure("simulated", gpipe.configured(data, {...state.own, own_devices}), state.own, ""));
  state.figure = state.ownFigure = state.asItRan;
  state.controls = readAddress();
  view.fitted = true;
  startNavigation();
  startEditing();
  startQuestions();
  startCurve();
  for (const name of ["critical", "memory", "one"]) {
    field(name).checked = state[name];
    field(name).addEventListener("change", event => {
      state[name] = event.target.checked;
      redraw();
      if (name === "critical" && state.critical && !state.stale) {
        live.textContent = explained.textContent = criticalInWords(state.figure);
      }
    });
  }
  field("recorded").addEventListener("input", event => {
    state.recorded = Number(event.target.value);
    pointAt(null);
    redraw();
  });
  startTheme();
  document.querySelectorAll(".word").forEach(explainWord);
  for (const [name, text] of Object.entries(WORDS)) {
    field("words").appendChild(document.createElement("dt")).textContent = name;
    field("words").appendChild(document.createElement("dd")).textContent = text;
  }
  addEventListener("hashchange", () => {
    state.history.push(state.controls);
    state.controls = readAddress();
    redraw();
  });
  redraw();
}

start();
