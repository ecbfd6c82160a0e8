// The order of actions, changed by hand: an action is dragged, or moved with Alt and an arrow, within its row.

// The rows that are edited: those of the lanes that one sees.
function rowsOfLanes({joined, order, rows, device_of_stage}) {
  return joined && !order ? gpipe.rowsOfDevices(rows, device_of_stage) : rows;
}

// Whose row it is.
function rowWord(row, figure) {
  const stages = new Set(row.map(action => action.stage)), [stage] = stages;
  return stages.size > 1 ? `device ${figure.device_of_stage[stage]}` : `stage ${stage}`;
}

// Where an action is: its row and its place there.
function placeOf(rows, key) {
  const row = rows.findIndex(actions => actions.some(action => gpipe.key(action) === key));
  return [row, rows[row].findIndex(action => gpipe.key(action) === key)];
}

function withMoved(rows, key, to) {
  const [row, from] = placeOf(rows, key);
  const actions = [...rows[row]];
  const [action] = actions.splice(from, 1);
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

function moveAction(figure, key, to) {
  pointAt(null);
  const rows = rowsOfLanes(figure), whose = rowWord(rows[placeOf(rows, key)[0]], figure);
  change({rows: withMoved(rows, key, to)});
  const now = state.stale ? null : state.figure;
  explained.textContent = `${key} is now number ${to + 1} of ${whose}: ${outcome(figure, now, gpipe.action(key).stage)}`;
}

// What the move of an action of a stage leads to, in time and in memory; of an order that cannot run there is nothing.
function outcome(before, now, stage) {
  if (!now?.timeline) return "this order cannot run.";
  const than = change => before.order ? "" : `, ${change()} before`;
  const time = () => difference(now.step_seconds, before.step_seconds, "shorter than", "longer than", "as long as");
  const own = of => peak(of.device_memory[of.device_of_stage[stage]]), change = of => {
    const more = of(now) - of(before);
    return more ? `${size(Math.abs(more))} ${more > 0 ? "more" : "less"} than` : "as much as";
  };
  const holds = (name, of) => `${name} ${size(of(now))}${than(() => change(of))}`;
  const is = own(now) === fullestPeak(now) && (before.order || own(before) === fullestPeak(before));
  const who = deviceWord(now, now.device_of_stage[stage]), device = devicesShared(now) ? "device" : "stage";
  return `a step of ${duration(now.step_seconds)}${than(time)}. ` +
    holds(`${capital(who)}${is ? ", the fullest," : ""} holds up to`, own) +
    `${is ? "" : `; ${holds(`the fullest ${device}`, fullestPeak)}`}. Idle: ${percent(idleShare(now))}.`;
}

function dragAction(event, piece) {
  const {figure, span} = piece, key = gpipe.key(span.action), rows = rowsOfLanes(figure), [row] = placeOf(rows, key);
  const others = rows[row].map(action => figure.spanOf.get(gpipe.key(action))).filter(other => other !== span);
  const grabbed = pointerTime(event) - span.start;
  const {node} = drawn.get("simulated").bars.get(key);
  let to = null, ghost = null;
  const follow = at => {
    const start = pointerTime(at) - grabbed, middle = start + (span.end - span.start) / 2, was = to;
    to = others.filter(other => (other.start + other.end) / 2 < middle).length;
    ghost ??= startGhost(node);
    ghost.bar.setAttribute("x", xOf(start));
    placeInsertion(ghost.line, others, to, piece.stage);
    if (to === was) return;
    const tried = gpipe.configured(data, {...state.controls, rows: withMoved(rows, key, to)});
    explained.textContent = `${key} here: ${outcome(figure, tried, piece.stage)}`;
  };
  drag(event, follow, false, done => {
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

// A line where the action would go.
function placeInsertion(line, others, to, stage) {
  const x = xOf(to < others.length ? others[to].start : others.at(-1)?.end ?? 0);
  const {top, bar} = drawn.get("simulated").rows[stage];
  line.setAttribute("d", `M${x} ${top - 3}V${top + bar + 3}`);
}

// An order that cannot run, as far as it can be drawn: its rows without waits.
function orderFigure({rows, device_of_stage, stages, balance, micro_batches, faulty}) {
  const costs = {F: "graph", R: "graph", B: "backward", I: "inputs", W: "weights"};
  const seconds = action => stages[action.stage][costs[action.kind]];
  const spans = device_of_stage.map(() => []);
  let most = 0;
  for (const row of rows) {
    let now = 0;
    for (const action of row) spans[action.stage].push({action, start: now, end: now += seconds(action)});
    most = Math.max(most, now);
  }
  const events = spans.map(() => []);
  return figureOf("simulated", {spans, events, device_of_stage}, {
    order: true, rows, step_seconds: most, marked: new Set(faulty.marked), waits: faulty.waits,
    micro_batches, balance, about: "the order only: it cannot run",
  });
}

function undo() {
  const before = state.history.pop();
  if (before) setControls(before);
}

function save(name, text, type) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], {type}));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

const FILE = "my_schedule.csv";

// Settings of that one run, plan or measurement, and what the file says or this page knows: what is recomputed, where
// stages are, how many replicas `auto` has led to.
const OF_ONE_RUN = ["run_folder", "resume", "write_schedule", "solve", "steps", "warm_up_steps", "rounds",
                    "stages_per_process", "placement", "recompute", "replicas"];

// The words of a command line behind the command.
function wordsOf(typed) {
  const words = typed.match(/(?:'[^']*'|"[^"]*"|\S)+/g);
  return words.slice(1 + words.findIndex(word => /^(train|plan|bench|check)$/.test(word)));
}

// Whether settings without a file make the order that is shown.
function isNamed() {
  return !state.controls.rows && gpipe.SCHEDULES.includes(state.controls.schedule);
}

// What the order that is shown is made from, where it has a name: else it is in a file, which says where stages are.
function orderSettings() {
  const {schedule, recompute, placement, stages_per_process, partitions} = gpipe.settled(data, state.controls);
  const set = {schedule: isNamed() ? schedule : FILE}, {rows} = state.figure;
  if (!isNamed()) { // of a file without an R this setting decides
    return rows.some(row => row.some(action => action.kind === "R")) ? set : {...set, recompute: "never"};
  }
  const made = gpipe.MADE_FOR[schedule];
  if (placement !== (made ?? "neighbours") && stages_per_process > 1) set.placement = placement;
  if (stages_per_process === partitions && partitions > 1) set.executor = "in_process";
  else if (stages_per_process !== (made === "v" ? 2 : 1)) set.stages_per_process = stages_per_process;
  return {...set, recompute};
}

// The command line that runs what is shown, as far as it differs from the run's own; of a run that was resumed, a
// setting has the value that was typed last.
function commandOf(command) {
  const {controls} = state;
  const set = {partitions: controls.partitions, micro_batches: controls.micro_batches, ...orderSettings()};
  if (data.setting.replicas > 1) set.replicas = data.setting.replicas;
  if (controls.balance) set["partition.balance"] = `[${controls.balance.join(",")}]`;
  const dropped = [...Object.keys(set), ...OF_ONE_RUN, "-m", "--multirun"];
  if (isNamed()) dropped.push("executor");
  if (controls.partitions !== state.own.partitions) dropped.push("partition.balance");
  if (controls.partitions !== state.own.partitions || controls.balance) dropped.push("partition.method");
  const keyOf = word => word.replace(/^['"]/, "").split("=")[0];
  const typed = new Map(data.commands.flatMap(wordsOf).map(word => [keyOf(word), word]));
  const words = [...typed].filter(([key]) => !dropped.includes(key) && !/^hydra[./]/.test(key));
  // of a sweep: which value this run had is not known here
  const swept = words.filter(([, word]) => /=([^[({'"]*,|(choice|range|glob)\()/.test(word));
  const kept = words.filter(word => !swept.includes(word)).map(([, word]) => word);
  kept.push(...swept.map(([key]) => `${key}=...`));
  return ["gpipe", command, ...kept, ...Object.entries(set).map(([key, value]) => `${key}=${value}`)].join(" ");
}

function showOrder() {
  const edited = Boolean(state.controls.rows), wrong = Boolean(drawn.get("simulated").figure.order);
  field("order-text").textContent = wrong ? "An order that cannot run is not saved." : edited
    ? `The order was changed by hand. Saved as ${FILE}, it is a schedule that gpipe runs.`
    : "Drag an action to another place of its row: the step is simulated anew at once. What is shown can be saved, " +
      "changed by hand or not.";
  field("run-text").textContent = isNamed() ? "Run it" : `Run ${FILE}`;
  field("csv").disabled = wrong;
  field("reset").disabled = !edited;
  field("commands").classList.toggle("stale", wrong);
  field("commands").textContent = `${commandOf("train")}\n${commandOf("check")}`;
}

// The picture as a file of its own: with its colours written out, as other programs know no variables of a page.
function pictureFile() {
  const copy = svg.cloneNode(true), colours = getComputedStyle(document.documentElement);
  const resolved = text => text.replace(/var\((--[a-z-]+)\)/g, (_, name) => colours.getPropertyValue(name).trim());
  const rules = [...document.styleSheets[0].cssRules].map(rule => rule.cssText)
    .filter(text => text.startsWith("#lanes") && !/:hover|:focus/.test(text));
  copy.prepend(make("title", {}, null, data.title), make("style", {}, null, resolved(rules.join("\n"))));
  copy.querySelectorAll("[tabindex]").forEach(node => node.removeAttribute("tabindex"));
  copy.querySelectorAll(".head").forEach(node => node.remove());
  for (const node of copy.querySelectorAll("path, circle")) {
    for (const name of ["fill", "stroke"]) {
      if (node.hasAttribute(name)) node.setAttribute(name, resolved(node.getAttribute(name)));
    }
  }
  const {width, height} = view;
  copy.setAttribute("xmlns", SVG);
  copy.setAttribute("viewBox", `0 0 ${width} ${height}`);
  copy.setAttribute("style", `background:${colours.getPropertyValue("--paper").trim()}`);
  return new XMLSerializer().serializeToString(copy);
}

function startEditing() {
  const on = (id, does) => field(id).addEventListener("click", does);
  on("undo", undo);
  on("reset", () => change({rows: undefined}));
  on("csv", () => save(FILE, gpipe.csv(state.figure.rows, state.figure.device_of_stage), "text/csv"));
  on("svg", () => save("pipeline.svg", pictureFile(), "image/svg+xml"));
}
