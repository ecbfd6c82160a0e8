// The simulated setting: sliders, the numbers they lead to, the address that stores it.
const EDITED = new Option("edited", "edited"); // offered while the order is edited
const IN_ADDRESS = {partitions: "K", micro_batches: "M", schedule: "schedule", recompute: "recompute",
                    stages_per_process: "stages", placement: "placement", backward_factor: "backward", link_factor: "transfers"};

function offeredMicroBatches() {
  return Object.keys(data.costs.of).map(Number);
}

function offeredPartitions() {
  return Object.keys(data.cuts).map(Number);
}

// ---- changing it ----

// Sets some controls. An edited order is dropped with the setting that it was made for.
function change(values, remember = true) {
  const controls = {...state.controls, ...values};
  const kept = Object.keys(values).every(name =>
    ["rows", "backward_factor", "link_factor", "own_devices"].includes(name));
  if (!kept) controls.rows = undefined;
  if ("partitions" in values) {
    const before = state.controls, oneDevice = before.partitions > 1 && before.stages_per_process >= before.partitions;
    controls.stages_per_process = oneDevice ? controls.partitions
      : Math.min(controls.partitions, controls.stages_per_process);
  }
  return setControls(controls, remember);
}

// Simulates other controls; returns false, with a message, for impossible ones.
function setControls(controls, remember = true) {
  const result = gpipe.configure(data, controls);
  if (!result.timeline) {
    showControls();
    showProblem("This setting is impossible.", result.problem);
    return false;
  }
  if (remember) state.history.push(state.controls);
  state.controls = controls;
  update(result);
  return true;
}

// A slider sends many values while it is dragged: they are undone in one step, and the address, which takes a browser
// milliseconds, is written when the slider is released.
function onField(id, read) {
  field(id).addEventListener("input", event => {
    const value = read(event.target.type === "checkbox" ? event.target.checked : event.target.value);
    if (value === state.controls[id] && !(id === "schedule" && state.controls.rows)) return;
    const again = state.sliding;
    state.sliding = event.target.type === "range";
    if (!change({[id]: value}, !again)) state.sliding = again;
  });
  field(id).addEventListener("change", () => {
    state.sliding = false;
    writeAddress();
    live.textContent = explained.textContent;
  });
}

function startControls() {
  field("partitions").max = offeredPartitions().length - 1;
  field("micro_batches").max = offeredMicroBatches().length - 1;
  addChoices("schedule", ORDERS, name => gpipe.isKnown(name) || state.original.schedule === name);
  addChoices("recompute", RECOMPUTES, () => true);
  addChoices("placement", PLACEMENTS, name => name !== gpipe.AS_PLANNED || state.original.placement === name);
  onField("partitions", at => offeredPartitions()[at]);
  onField("micro_batches", at => offeredMicroBatches()[at]);
  onField("schedule", String);
  onField("recompute", String);
  onField("stages_per_process", Number);
  onField("placement", String);
  onField("backward_factor", at => 2 ** (at / 4));
  onField("link_factor", at => 2 ** (-at / 4));
  onField("own_devices", Boolean);
  field("own_devices").closest(".field").hidden = !devicesShare();
  field("own").addEventListener("click", () => setControls(state.original));
}

function addChoices(id, texts, offered) {
  for (const name of Object.keys(texts).filter(offered)) field(id).append(new Option(name, name));
}

// ---- questions, answered by a change of controls or a place in the picture ----

function startQuestions() {
  const {original} = state, most = offeredMicroBatches().at(-1);
  const more = offeredMicroBatches().findLast(many => many <= 4 * original.micro_batches);
  ask("Where is the bubble?", showBubble);
  if (original.micro_batches < most) askWhatIf(`What would M = ${more} do?`, {micro_batches: more});
  const keeps = original.recompute === "never";
  askWhatIf(keeps ? "What does recomputation cost and save?" : "What if nothing were recomputed?",
    {recompute: keeps ? "always" : "never"});
  if (original.schedule !== "1f1b") askWhatIf("What does 1f1b change?", {schedule: "1f1b"});
}

// Questions are about the original setting, whatever was tried before.
function resetToOriginal() {
  if (changes().length) setControls(state.original);
}

function ask(text, answer) {
  const button = field("questions").appendChild(document.createElement("button"));
  button.type = "button";
  button.textContent = text;
  button.addEventListener("click", () => {
    answer();
    explained.scrollIntoView({block: "nearest"});
  });
}

// Changes a single control of the original setting, so that the answer is about nothing else.
function askWhatIf(text, values) {
  ask(text, () => {
    setControls({...state.original, ...values});
    live.textContent = explained.textContent;
  });
}

// Points at the longest piece of bubble.
function showBubble() {
  resetToOriginal();
  const {figure} = state, long = region => region.end - region.start;
  const pieces = [...figure.regions].flatMap(([device, regions]) => regions.map(region => ({...region, device})))
    .filter(region => region.why === "bubble");
  if (pieces.length) {
    const region = pieces.reduce((most, piece) => long(piece) > long(most) ? piece : most);
    pointAt({figure, what: "region", stage: figure.device_of_stage.indexOf(region.device), region});
    const share = percent(figure.breakdown.bubble);
    explained.textContent = `With the ${owner()}'s own setting, simulated, ${share} of the step is bubble, in ` +
      `${pieces.length} hatched pieces. The longest one: ${explainRegion(figure, region)}`;
  } else explained.textContent = "There is no bubble: no device waits for another.";
  live.textContent = explained.textContent;
}

// The effect of the changes, compared with the original setting.
function changeInWords() {
  const parts = differences(state.figure, state.originalFigure).map(([name, verb, was, now]) =>
    `the ${name} ${verb} ${now} instead of ${was}`);
  const text = list(parts) || "step time, recomputation, bubble and memory do not change";
  return `${changes().join("; ")}: ${text}.${smallInWords()}`;
}

// Differences between two simulated steps, as they are shown: [what, verb, in the other, in this one].
function differences(figure, other) {
  const shown = of => [
    ["step", "takes", duration(of.step_seconds)], ["recomputation", "is", percent(of.breakdown.recompute)],
    ["bubble", "is", percent(of.breakdown.bubble)], [`fullest ${devicesShared(of) ? "device" : "stage"}`, "holds", size(fullestPeak(of))],
  ];
  const before = shown(other);
  return shown(figure).map(([name, verb, now], at) => [name, verb, before[at][2], now])
    .filter(([, , was, now]) => was !== now);
}

function devicesShared({ofDevice, device_of_stage}) {
  return ofDevice ? ofDevice.size < device_of_stage.length : new Set(device_of_stage).size < device_of_stage.length;
}

// Why more micro-batches can make a step longer: smaller ones cost more per sample.
function smallInWords() {
  const {figure, originalFigure} = state, samples = of => data.setting.samples / of.micro_batches;
  const perSample = of => of.stages.reduce((sum, stage) => sum + stage.graph + stage.backward, 0) / samples(of);
  const factor = perSample(figure) / perSample(originalFigure) / state.controls.backward_factor;
  if (figure.micro_batches === originalFigure.micro_batches || Math.abs(factor - 1) < 0.1) return "";
  const [now, before] = [figure, originalFigure].map(of => decimal(samples(of)));
  return ` A micro-batch has ${now} instead of ${before} samples, and each sample takes ` +
    `${factor.toFixed(2)} \u00d7 as long to compute: ` +
    `${factor > 1 ? "small micro-batches use the device less efficiently" : "large micro-batches use the device more efficiently"}.`;
}

// ---- text of the controls ----

function showControls() {
  const {controls} = state;
  field("partitions").value = offeredPartitions().indexOf(controls.partitions);
  field("micro_batches").value = offeredMicroBatches().indexOf(controls.micro_batches);
  if (controls.rows) field("schedule").append(EDITED);
  else EDITED.remove();
  field("schedule").value = controls.rows ? EDITED.value : controls.schedule;
  field("recompute").value = controls.recompute;
  field("own_devices").checked = controls.own_devices;
  field("devices-meaning").textContent = devicesInWords();
  const {placement, stages_per_process} = gpipe.resolveControls(data, controls), several = stages_per_process > 1;
  field("stages_per_process").max = controls.partitions;
  field("stages_per_process").disabled = controls.partitions === 1;
  field("stages_per_process").value = stages_per_process;
  field("placement").value = placement;
  field("placement").disabled = !several || stages_per_process >= controls.partitions
    || controls.schedule === "interleaved" || !gpipe.isKnown(controls.schedule);
  field("placement-meaning").textContent = placementInWords(placement, several);
  field("backward_factor").value = 4 * Math.log2(controls.backward_factor);
  field("link_factor").value = -4 * Math.log2(controls.link_factor);
  const faster = 1 / controls.link_factor;
  showValue("partitions", controls.partitions);
  showValue("micro_batches", controls.micro_batches);
  showValue("stages_per_process", several ? `${stages_per_process}: ${state.figure.ofDevice.size} devices` : stages_per_process);
  showValue("backward_factor", `1 : ${decimal(backwardRatio())}`);
  showValue("link_factor", faster === 1 ? "unchanged" :
    faster > 1 ? `${decimal(faster)} \u00d7 faster` : `${decimal(1 / faster)} \u00d7 slower`);
  field("schedule-meaning").textContent = orderInWords();
  field("recompute-meaning").textContent = RECOMPUTES[controls.recompute] + (controls.rows ? ""
    : compareWith({recompute: controls.recompute === "never" ? "always" : "never"}));
  field("undo").disabled = !state.history.length;
  field("own").disabled = !changes().length;
}

function placementInWords(placement, several) {
  if (!several) return "matters only with several stages per device";
  const {schedule} = state.controls, made = schedule === "interleaved" ? ", as interleaved requires" : "";
  return PLACEMENTS[placement].replace("PLANNED", owner()) + made;
}

function showValue(id, text) {
  field(`${id}-value`).textContent = text;
  field(id).setAttribute("aria-valuetext", text);
}

function orderInWords() {
  const {schedule, rows} = state.controls;
  if (rows) return `edited, starting from ${schedule}` + compareWith({schedule, rows: undefined});
  const chosen = schedule === "auto" && data.setting.chosen_order;
  return (chosen ? `${ORDERS.auto}: ${chosen}` : ORDERS[schedule]) +
    compareWith({schedule: schedule === "gpipe" ? "1f1b" : "gpipe"});
}

// The difference to another choice on the same devices, both simulated, so that hints agree with the tiles.
function compareWith(values) {
  const {figure, controls} = state, [name] = Object.values(values);
  if (figure.large) return ""; // it would take seconds
  const other = gpipe.configure(data, {...gpipe.resolveControls(data, controls), ...values});
  if (!other.timeline) return "";
  const parts = differences(other, figure).map(([what, , was, now]) => `\n${what} ${was} \u2192 ${now}`);
  return `.\nWith ${name}${parts.length ? `:${parts.join("")}` : ": no difference."}`;
}

// The effect of the switch on what is shown.
function devicesInWords() {
  const {figure, controls} = state, devices = figure.ofDevice.size, factor = gpipe.slowdowns(data, devices).at(-1) ?? 1;
  if (devices === 1) return "There is only one device.";
  if (controls.own_devices) return `If switched off, the stages share the ${owner()}'s ${coresInWords()}.`;
  return `The stages share the ${owner()}'s ${coresInWords()}` + (factor < 1.005 ? ", which is enough for all."
    : `: while all ${devices} compute, each takes ${decimal(factor)} \u00d7 as long.`);
}

function coresInWords() {
  const {cores} = data.slowdown;
  return cores ? `${cores} core${cores > 1 ? "s" : ""}` : "machine";
}

// The time of a backward, divided by the time of a forward that keeps its graph, over all layers.
function backwardRatio() {
  const all = name => state.figure.stages.reduce((sum, stage) => sum + stage[name], 0);
  return all("graph") ? all("backward") / all("graph") : 0;
}

// Differences from the original setting, in words.
function changes() {
  const {controls, original} = state;
  const names = {partitions: "K", micro_batches: "M", stages_per_process: "stages per device"};
  const now = gpipe.resolveControls(data, controls);
  const found = CONTROL_NAMES.filter(name => now[name] !== original[name])
    .map(name => `${names[name] ?? name} ${original[name]} \u2192 ${now[name]}`);
  if (controls.backward_factor !== 1) found.push(`backward \u00d7 ${decimal(controls.backward_factor)}`);
  if (controls.link_factor !== 1) found.push(`transfers \u00d7 ${decimal(controls.link_factor)}`);
  if (controls.own_devices) found.push("a separate device for each stage");
  if (controls.rows) found.push("edited order");
  if (found.length && controls.partitions === original.partitions && original.partitions <= 16 &&
    String(state.figure.balance) !== String(data.cut.balance)) {
    found.push(`a new cut of the layers, ${data.cut.balance.join("-")} \u2192 ${state.figure.balance.join("-")}`);
  }
  return found;
}

// The source of the seconds, and what is assumed.
function costsInWords() {
  const {source, basis, halves} = data.costs, parts = [`Based on ${source}.`];
  if (basis === "other_device") parts.push("Those are for another device: only the ratios between layers count.");
  const split = state.figure.timeline.spans.flat().some(({action}) => action.kind === "I");
  if (split && halves === "assumed") parts.push("I and W are assumed to take half of a backward each.");
  return parts.join(" ");
}

// ---- numbers ----

function tile(parent, name, value, ...lines) {
  const node = parent.appendChild(document.createElement("div"));
  const title = node.appendChild(document.createElement("span"));
  title.append(name);
  node.appendChild(document.createElement("b")).textContent = value;
  lines.filter(Boolean).forEach(line => node.appendChild(document.createElement("small")).append(line));
  return node;
}

function showNumbers(baseline) {
  const section = field("numbers"), {figure, originalFigure} = state;
  section.replaceChildren();
  const same = !changes().length, devices = figure.ofDevice.size;
  tile(section, "step", duration(figure.step_seconds), same ? measuredLine() :
    `${difference(figure.step_seconds, originalFigure.step_seconds, "shorter than", "longer than", "as long as")} ` +
    `with the ${owner()}'s own setting, ${duration(originalFigure.step_seconds)}`);
  tile(section, "samples per second", decimal(figure.samples_per_second), same ? "" :
    `${difference(figure.samples_per_second, originalFigure.samples_per_second, "fewer than", "more than", "as many as")} ` +
    `with the ${owner()}'s own setting, ${decimal(originalFigure.samples_per_second)}`);
  speedUpTile(section, devices, baseline);
  bubbleTile(section, devices);
  memoryTile(section);
}

function speedUpTile(section, devices, baseline) {
  const cores = data.slowdown.cores ? `, with all ${coresInWords()}` : "";
  const one = `one device with the whole mini-batch, nothing recomputed${cores}`;
  if (!baseline) {
    tile(section, "speed-up", "\u2013", `${one}, does not fit`);
    return;
  }
  const speedup = baseline.step_seconds / state.figure.step_seconds, share = speedup / devices / data.setting.replicas;
  tile(section, "speed-up", `${speedup.toFixed(2)} \u00d7`, `over ${one}: ${duration(baseline.step_seconds)}`,
    !devicesShare() && devices > 1 && `${percent(share)} of a perfect speed-up on ${devices} devices`);
}

function bubbleTile(section, devices) {
  const {figure} = state, {micro_batches: M} = figure, K = state.controls.stages_per_process > 1 ? "D" : "K";
  const node = tile(section, "", percent(figure.breakdown.bubble), `all idle time: ${percent(idleShare(figure))}`,
    `equal ${K === "D" ? "devices" : "stages"} with gpipe or 1f1b: (${K}\u22121)/(M+${K}\u22121) = ` +
      `(${devices}\u22121)/(${M}+${devices}\u22121) = ${percent((devices - 1) / (M + devices - 1))}`);
  node.firstChild.append(word("bubble"));
  node.id = "ideal";
}

function memoryTile(section) {
  const {figure} = state, peaks = figure.device_memory.map(peak), shared = devicesShared(figure);
  const device = peaks.indexOf(Math.max(...peaks)), stages = stagesOn(figure, device), {limit_bytes} = figure;
  const limit = limit_bytes * stages.length, each = shared ? `of device ${device}` : "per stage";
  const versus = limit && `${peaks[device] > limit ? "over" : "within"} the memory limit of ${size(limit)} ${each}`;
  const originalPeak = changes().length ? `${owner()}'s own setting: ${size(fullestPeak(state.originalFigure))}` : "";
  const alone = stages.length > 1
    && `${list(stages.map(stage => size(peak(figure.memory[stage]))))} for its stages separately`;
  const where = `at most, on ${deviceWord(figure, device)}, without libraries`;
  const node = tile(section, "", size(peaks[device]), where, alone, versus, originalPeak);
  node.firstChild.append(word("memory"));
}

function measuredLine() {
  const step = data.steps[state.recorded];
  return step ? `measured: ${duration(step.step_seconds)}, ` +
    difference(step.step_seconds, state.figure.step_seconds, "shorter", "longer", "as simulated")
    : `the ${owner()}'s own setting`;
}

function word(name) {
  const node = document.createElement("span");
  node.className = "word";
  node.dataset.word = name;
  node.textContent = name;
  explainWord(node);
  return node;
}

// Shows the meaning of a term to pointer, keyboard and screen reader.
function explainWord(node) {
  node.tabIndex = 0;
  node.setAttribute("aria-description", GLOSSARY[node.dataset.word]);
  const show = () => {
    const {left, bottom} = node.getBoundingClientRect();
    tip.textContent = GLOSSARY[node.dataset.word];
    tip.hidden = false;
    tip.style.left = `${Math.max(4, Math.min(left, innerWidth - tip.offsetWidth - 8))}px`;
    tip.style.top = `${bottom + 6}px`;
  };
  for (const what of ["pointerenter", "focus"]) node.addEventListener(what, show);
  for (const what of ["pointerleave", "blur"]) node.addEventListener(what, () => tip.hidden = true);
}

// ---- where the time goes ----

function showShares() {
  const table = field("shares"), step = data.steps[state.recorded];
  const columns = [["simulated", state.figure]];
  if (step) columns.unshift(["measured", step]);
  if (changes().length) columns.push([`the ${owner()}'s own setting, simulated`, state.originalFigure]);
  table.replaceChildren();
  const head = table.createTHead().insertRow(), body = table.createTBody();
  head.insertCell();
  for (const [name] of columns) head.appendChild(document.createElement("th")).textContent = name;
  const row = (name, cell, part) => {
    const line = body.insertRow();
    if (part) line.className = "part";
    const title = line.appendChild(document.createElement("th"));
    title.append(...name);
    columns.forEach(([, of]) => cell(line.insertCell(), of));
  };
  row(["step"], (cell, of) => cell.textContent = duration(of.step_seconds));
  const share = name => (cell, of) => gauge(cell, name === "idle" ? idleShare(of) : of.breakdown[name]);
  for (const name of ["compute", "recompute", "update", "idle", ...IDLE]) {
    const shown = shareWord(name);
    row([GLOSSARY[shown] ? word(shown) : shown], share(name), IDLE.includes(name));
  }
}

function gauge(cell, share) {
  cell.textContent = percent(share);
  const room = cell.appendChild(document.createElement("span"));
  room.className = "gauge";
  room.appendChild(document.createElement("i")).style.width = `${60 * Math.min(1, share)}px`;
}

// ---- the address ----

function addressOf(controls) {
  const words = new URLSearchParams();
  for (const [name, word] of Object.entries(IN_ADDRESS)) {
    if (controls[name] !== state.original[name]) words.set(word, controls[name]);
  }
  if (controls.own_devices) words.set("devices", "own");
  return words;
}

function writeAddress() {
  const words = addressOf(state.controls);
  if (data.steps.length && state.recorded !== data.steps.length - 1) words.set("step", data.steps[state.recorded].step);
  try {
    history.replaceState(null, "", `${location.href.split("#")[0]}${words.size ? `#${words}` : ""}`);
  } catch {
    // a page within another one may not change its address
  }
}

// The controls that an address asks for; values that are not offered are ignored.
function readAddress() {
  const words = new URLSearchParams(location.hash.slice(1)), controls = {...state.original};
  const offered = {
    partitions: value => offeredPartitions().includes(value),
    micro_batches: value => offeredMicroBatches().includes(value),
    stages_per_process: value => Number.isInteger(value) && value >= 1 && value <= controls.partitions,
    schedule: value => value !== EDITED.value && [...field("schedule").options].some(one => one.value === value),
    recompute: value => [...field("recompute").options].some(option => option.value === value),
    placement: value => [...field("placement").options].some(option => option.value === value),
    backward_factor: value => value >= 0.25 && value <= 4,
    link_factor: value => value >= 1 / 16 && value <= 16,
  };
  for (const [name, word] of Object.entries(IN_ADDRESS)) {
    const given = words.get(word);
    if (given === null) continue;
    const value = ["schedule", "recompute", "placement"].includes(name) ? given : Number(given);
    if (offered[name](value)) controls[name] = value;
  }
  controls.own_devices = devicesShare() && words.get("devices") === "own";
  const recorded = data.steps.findIndex(step => String(step.step) === words.get("step"));
  if (recorded >= 0) state.recorded = recorded;
  return controls;
}
