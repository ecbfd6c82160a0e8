// The page: its data, its state, and the redrawing after a change of state.
const data = JSON.parse(field("data").textContent);
const state = {
  original: null, // the controls of the run's own setting
  controls: null, // the simulated controls
  history: [], // earlier controls, for undo
  figure: null, // the simulated step
  originalFigure: null, // the run's own setting, simulated: others are compared with it
  recorded: 0, // index of the measured step that is shown
  pointed: null, // the piece under the pointer or with the focus
  dragging: false, // the pointer drags an action or the background
  sliding: false, // a slider is being dragged
  memory: true, one: true, // whether memory, and a single device, are shown
};

function simulatedFigure(kind, result, controls, about) {
  const M = controls.micro_batches, {timeline, step_seconds} = result;
  const regions = new Map(gpipe.idleRegions(timeline, M, step_seconds));
  return figureOf(kind, timeline, {...result, micro_batches: M, about, regions});
}

const HINT = field("explained").textContent;

// A recorded step in the simulator's form.
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
    step_seconds: step.step_seconds, breakdown: step.breakdown, micro_batches: M, balance: data.cut.balance,
    regions: new Map(gpipe.idleRegions(timeline, M, step.step_seconds)),
    about: `epoch ${step.epoch}, step ${step.step.toLocaleString("en")}` +
      (step.median_of > 1 ? `, the median of ${step.median_of.toLocaleString("en")} steps` : ""),
  });
}

function aboutControls(controls) {
  const short = `K = ${controls.partitions}, M = ${controls.micro_batches}`;
  if (view.width < 720) return short;
  const {placement, stages_per_process} = gpipe.resolveControls(data, controls);
  const placed = stages_per_process > 1 && stages_per_process < controls.partitions ? ` (${placement})` : "";
  const order = (controls.rows ? "edited order" : controls.schedule) + placed;
  return `${short}, ${order}, recompute ${controls.recompute}${controls.own_devices ? ", separate devices" : ""}`;
}

function showMeasured() {
  const step = data.steps[state.recorded];
  show("measured", measuredFigure());
  field("scrub").hidden = data.steps.length < 2;
  field("contended").hidden = !data.contended;
  field("contended").textContent = "Times are inflated by other programs, which used these cores for " +
    `${percent(data.contended)} of the time while the run was measured. Run it again on an idle machine, or measure ` +
    "with gpipe bench.";
  field("launched").hidden = !data.launched.length;
  field("launched").textContent = `When the run began, stages that graphs cannot replay: ${data.launched.join("; ")}.`;
  field("recorded").max = data.steps.length - 1;
  field("recorded").value = state.recorded;
  const left = data.steps_left_out ? `; ${data.steps_left_out} older steps are not on this page` : "";
  field("recorded-value").textContent = step
    ? `epoch ${step.epoch}, step ${step.step.toLocaleString("en")}: ${duration(step.step_seconds)}` +
      ` (${state.recorded + 1} of ${data.steps.length}${left})` : "";
  field("recorded").setAttribute("aria-valuetext", field("recorded-value").textContent);
  field("recorded-picture").hidden = !step?.picture;
  if (step?.picture) field("recorded-picture").src = step.picture;
}

// Draws the simulated step of the controls, and everything that follows from it.
function update(result) {
  const {controls} = state;
  state.figure = simulatedFigure("simulated", result, controls, aboutControls(controls));
  state.figure.original_seconds = state.originalFigure.step_seconds;
  const baseline = gpipe.baselineStep(data, controls);
  showSimulated(baseline && simulatedFigure("K = 1", baseline, {micro_batches: 1}, "one device, the whole mini-batch"));
  showControls();
  showProblem("This does not fit.", result.problem);
  showNumbers(baseline);
  showShares();
  showOrder();
  showLegend();
  field("costs").textContent = costsInWords();
  const changed = changes();
  if (!state.pointed) explained.textContent = changed.length ? changeInWords() : HINT;
  field("changed").textContent = changed.length ? `Changed: ${changed.join("; ")}.`
    : `This is the ${owner()}'s own setting.`;
  if (!state.sliding) writeAddress();
  if (view.fitted) fit();
  layOut();
}

function showSimulated(oneDevice) {
  const pointed = state.pointed?.figure.kind !== "measured" && state.pointed?.span;
  if (state.pointed?.figure.kind !== "measured") state.pointed = null;
  show("simulated", state.figure);
  show("K = 1", state.one && state.controls.partitions > 1 ? oneDevice : null);
  const again = pointed && drawn.get("simulated").bars.get(gpipe.key(pointed.action));
  if (again && svg.querySelector(".action:focus")) pointAt(again.node.piece);
  if (!svg.querySelector('.action[tabindex="0"]')) svg.querySelector(".simulated .action")?.setAttribute("tabindex", 0);
}

function showProblem(title, problem) {
  const box = field("problem"), bold = document.createElement("b");
  box.hidden = !problem;
  bold.textContent = `${title} `;
  box.replaceChildren(bold, `${problem}.`);
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
  if (state.figure.joined) entry("", "2F0: F0 of stage 2; a device's later stages are drawn lower");
  const marks = [...IDLE.map(name => [name, shareWord(name)]), ["update", "weight update"]];
  if (state.memory) {
    marks.push(["weights", "weights"], ["state", "gradients, optimizer"], ["space", "buffers, workspace"]);
    marks.push(["held", "activations"]);
    if (shownLimit(state.figure)) marks.push(["limit", "memory limit"]);
  }
  for (const [name, text] of marks) {
    const mark = make("svg", {viewBox: "0 0 30 14", "aria-hidden": true});
    make("path", {class: name, d: name === "limit" ? "M0 7H30" : "M0 0H30V14H0z"}, mark);
    entry(mark, text);
  }
}

// Redraws everything, for another width or with other parts.
function redraw() {
  measureWidth();
  showMeasured();
  update(gpipe.configure(data, state.controls));
}

function start() {
  document.title = `${data.title}: pipeline`;
  field("title").textContent = data.title;
  field("subject").textContent = [data.run, data.commands.at(-1)].filter(Boolean).join(" \u00b7 ");
  state.original = gpipe.originalControls(data);
  state.recorded = Math.max(0, data.steps.length - 1);
  startPicture();
  startControls();
  field("own").textContent = `the ${owner()}'s own setting`;
  state.figure = state.originalFigure = simulatedFigure("simulated", gpipe.configure(data, state.original), state.original, "");
  state.controls = state.original;
  view.fitted = true;
  startNavigation();
  startEditing();
  startQuestions();
  for (const name of ["memory", "one"]) {
    field(name).checked = state[name];
    field(name).addEventListener("change", event => {
      state[name] = event.target.checked;
      redraw();
    });
  }
  field("recorded").addEventListener("input", event => {
    state.recorded = Number(event.target.value);
    pointAt(null);
    redraw();
  });
  startTheme();
  document.querySelectorAll(".word").forEach(explainWord);
  for (const [name, text] of Object.entries(GLOSSARY)) {
    field("words").appendChild(document.createElement("dt")).textContent = name;
    field("words").appendChild(document.createElement("dd")).textContent = text;
  }
  addEventListener("hashchange", () => {
    setControls(readAddress());
  });
  const asked = readAddress();
  if (gpipe.configure(data, asked).timeline) state.controls = asked;
  redraw();
}

start();
