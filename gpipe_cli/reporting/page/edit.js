// Editing the order of actions: an action is dragged, or moved with Alt and an arrow, within its row.
const FILE = "my_schedule.csv";

// The edited rows, one for each visible lane.
function rowsOfLanes({joined, rows, device_of_stage}) {
  return joined ? gpipe.rowsOfDevices(rows, device_of_stage) : rows;
}

// The row of an action, and its index in it.
function placeOf(rows, key) {
  const row = rows.findIndex(actions => actions.some(action => gpipe.key(action) === key));
  return [row, rows[row].findIndex(action => gpipe.key(action) === key)];
}

function withMoved(rows, key, to) {
  const [row, from] = placeOf(rows, key), actions = [...rows[row]], [action] = actions.splice(from, 1);
  actions.splice(to, 0, action);
  return rows.map((others, number) => number === row ? actions : others);
}

function moveByKey({figure, span}, arrowKey) {
  const key = gpipe.key(span.action), rows = rowsOfLanes(figure), [row, from] = placeOf(rows, key);
  const last = rows[row].length - 1;
  const to = {ArrowLeft: from - 1, ArrowRight: from + 1, Home: 0, End: last}[arrowKey] ?? from;
  if (to < 0 || to > last || to === from) return;
  moveAction(figure, key, to);
  const said = explained.textContent;
  focusAction("simulated", key);
  live.textContent = explained.textContent = said;
}

// An order that cannot run is refused, with the reason.
function moveAction(figure, key, to) {
  pointAt(null);
  const controls = {...state.controls, rows: withMoved(rowsOfLanes(figure), key, to)};
  const said = outcome(figure, gpipe.configure(data, controls), gpipe.action(key).stage);
  setControls(controls);
  explained.textContent = `${key} moved: ${said}`;
}

// The effect of moving an action of a stage, on time and memory.
function outcome(before, now, stage) {
  if (!now.timeline) return `this order cannot run: ${now.problem}.`;
  const devicePeak = of => peak(of.device_memory[of.device_of_stage[stage]]), more = devicePeak(now) - devicePeak(before);
  const change = more ? `${size(Math.abs(more))} ${more > 0 ? "more" : "less"} than` : "as much as";
  return `a step of ${duration(now.step_seconds)}, ` +
    `${difference(now.step_seconds, before.step_seconds, "shorter than", "longer than", "as long as")} before. ` +
    `${capital(deviceWord(now, now.device_of_stage[stage]))} holds up to ${size(devicePeak(now))}, ${change} before. ` +
    `Idle: ${percent(idleShare(now))}.`;
}

function dragAction(event, piece) {
  const {figure, span} = piece, key = gpipe.key(span.action), rows = rowsOfLanes(figure), [row] = placeOf(rows, key);
  const others = rows[row].map(action => figure.spanOf.get(gpipe.key(action))).filter(other => other !== span);
  const grabbed = pointerTime(event) - span.start, {node} = drawn.get("simulated").bars.get(key);
  let to = null, ghost = null;
  const follow = at => {
    const start = pointerTime(at) - grabbed, middle = start + (span.end - span.start) / 2, was = to;
    to = others.filter(other => (other.start + other.end) / 2 < middle).length;
    ghost ??= startGhost(node);
    ghost.bar.setAttribute("x", xOf(start));
    placeInsertion(ghost.line, others, to, piece.stage);
    if (to === was) return;
    const tried = gpipe.configure(data, {...state.controls, rows: withMoved(rows, key, to)});
    explained.textContent = `${key} at this place: ${outcome(figure, tried, piece.stage)}`;
  };
  drag(event, follow, done => {
    ghost?.bar.remove();
    ghost?.line.remove();
    node.style.opacity = "";
    if (done && to !== null && to !== placeOf(rows, key)[1]) moveAction(figure, key, to);
  });
}

function startGhost(node) {
  const bar = node.cloneNode();
  bar.classList.add("ghost");
  bar.removeAttribute("tabindex");
  bar.removeAttribute("data-key");
  node.parentNode.append(bar);
  node.style.opacity = 0.3;
  return {bar, line: make("path", {class: "insert"}, node.parentNode)};
}

// Draws a line where the action would go.
function placeInsertion(line, others, to, stage) {
  const x = xOf(to < others.length ? others[to].start : others.at(-1)?.end ?? 0);
  const {top, bar} = drawn.get("simulated").rows[stage];
  line.setAttribute("d", `M${x} ${top - 3}V${top + bar + 3}`);
}

function undo() {
  const before = state.history.pop();
  if (before) setControls(before, false);
}

function saveOrder() {
  const link = document.createElement("a"), {rows, device_of_stage} = state.figure;
  link.href = URL.createObjectURL(new Blob([gpipe.csv(rows, device_of_stage)], {type: "text/csv"}));
  link.download = FILE;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

// The settings with which gpipe runs what is shown.
function showOrder() {
  const {partitions, micro_batches, schedule, recompute, stages_per_process, placement, rows} =
    gpipe.resolveControls(data, state.controls);
  const named = !rows && gpipe.isKnown(schedule);
  const settings = {partitions, micro_batches, schedule: named ? schedule : FILE};
  if (named) settings.recompute = recompute;
  else if (!state.figure.rows.flat().some(({kind}) => kind === "R")) settings.recompute = "never";
  if (named && stages_per_process > 1) Object.assign(settings, {stages_per_process, placement});
  field("reset").disabled = !rows;
  field("settings").textContent = Object.entries(settings).map(([name, value]) => `${name}=${value}`).join(" ");
}

function startEditing() {
  field("undo").addEventListener("click", undo);
  field("reset").addEventListener("click", () => change({rows: undefined}));
  field("csv").addEventListener("click", saveOrder);
}
