// Sentences about the picture: what an action is, what it waits for, and why a device is idle.
const NEAR = 1e-9; // seconds; times that differ by less are equal, except for rounding

// The action of another stage whose result an action waits for, if any.
function source(figure, action) {
  return figure.spanOf.get(figure.sourceOf(action));
}

// The action that an action waits for longest: its source or, in a simulation, a skip's that arrives later.
function awaited(figure, action) {
  const last = figure.timeline.transfers && gpipe.lastTransfer(figure.timeline, action);
  return last ? figure.spanOf.get(gpipe.key(last.from)) : source(figure, action);
}

// The action of the same stage whose result an action needs: for a backward, its forward or recomputation.
function sameStageSource(figure, action) {
  const {kind, stage, micro_batch} = action;
  const found = {R: ["F"], B: ["R", "F"], I: ["R", "F"], W: ["I"], F: []}[kind];
  return found.map(needed => figure.spanOf.get(gpipe.key({kind: needed, stage, micro_batch}))).find(Boolean);
}

function explainAction(figure, span) {
  const {action, start, end} = span;
  const {kind, stage, micro_batch} = action;
  const first = `${gpipe.key(action)} is the ${KIND_WORDS[kind]} of micro-batch ${micro_batch} on ${stageWord(figure, stage)}: ` +
    `${duration(end - start)}, from ${duration(start)} to ${duration(end)}.`;
  return `${first} ${whyThen(figure, span)}${linkInWords(figure, action)}`;
}

// Why an action did not start earlier.
function whyThen(figure, span) {
  const {action, start} = span;
  const needed = awaited(figure, action), before = figure.beforeOnDevice.get(span), earlier = sameStageSource(figure, action);
  const free = before ? before.end : 0;
  if (needed && start - free > shortest(figure)) return waitSentence(figure, span, needed, free);
  if (before) {
    const ready = needed ? `${gpipe.key(needed.action)} was ready at ${duration(needed.end)}` : null;
    const reason = `It starts as soon as its device has finished ${gpipe.key(before.action)}`;
    return ready && needed.end < free ? `${reason}; ${ready}.` : `${reason}.`;
  }
  if (needed) return `It waits for ${gpipe.key(needed.action)} of stage ${needed.action.stage}.`;
  return earlier ? `It needs ${gpipe.key(earlier.action)}.` : "It is the first action of its device and waits for nothing.";
}

// A note if no link is crossed.
function linkInWords(figure, action) {
  const sent = source(figure, action)?.action;
  if (!sent || figure.device_of_stage[sent.stage] !== figure.device_of_stage[action.stage]) return "";
  return ` The result of ${gpipe.key(sent)} stays on the device and crosses no link.`;
}

function waitSentence(figure, span, needed, free) {
  const {action, start} = span, on = stageWord(figure, needed.action.stage), name = gpipe.key(needed.action);
  const computed = Math.min(Math.max(needed.end, free), start);
  const who = `${stageWord(figure, action.stage)} waits ${duration(start - free)} for ${name}`;
  if (computed - free < shortest(figure)) return `Before it, ${who}, which ${on} has computed and is still sending.`;
  const way = start - computed > shortest(figure) ? `, and sending it takes ${duration(start - computed)}` : "";
  return `Before it, ${who}: ${on} computes it until ${duration(needed.end)}${way}.`;
}

// Waits shorter than this are not reported.
function shortest(figure) {
  return Math.max(NEAR, figure.step_seconds * 1e-4);
}

function explainRegion(figure, region) {
  const {device, start, end, why} = region, who = deviceWord(figure, device);
  const first = `${shareWord(why)}, ${duration(end - start)}, from ${duration(start)} to ${duration(end)}:`;
  if (why === "set_up") return `${first} ${GLOSSARY["set-up"]}`;
  const next = figure.ofDevice.get(device).find(span => span.start >= end - NEAR);
  const needed = next && awaited(figure, next.action);
  const cause = why === "imbalance" ? ` Stages have unequal work: ${mostWork(figure)}.` : "";
  if (!next) return `${first} ${who} has finished all its work; the step continues until ${lastAction(figure)}.${cause}`;
  if (!needed) {
    const measured = figure.kind !== "measured" ? "" : ", which waits for no other stage: something held up the process";
    return `${first} ${who} is idle before ${gpipe.key(next.action)}${measured}.${cause}`;
  }
  const name = gpipe.key(needed.action), on = stageWord(figure, needed.action.stage);
  if (why === "transfer") {
    return `${first} ${who} waits for ${name}, which ${on} has computed and is still sending over the link.`;
  }
  return `${first} ${who} waits for ${name}, which it needs for ${gpipe.key(next.action)}: ${on} computes it ` +
    `until ${duration(needed.end)}.${cause}`;
}

function lastAction(figure) {
  const spans = figure.timeline.spans.flat(), last = spans.reduce((most, span) => span.end > most.end ? span : most);
  return `${stageWord(figure, last.action.stage)} has finished ${gpipe.key(last.action)}`;
}

function mostWork(figure) {
  const work = figure.timeline.spans.map((_, stage) => workOf(figure, stage));
  const most = work.indexOf(Math.max(...work));
  const mean = work.reduce((sum, seconds) => sum + seconds, 0) / work.length;
  return `stage ${most} works longest, ${duration(work[most])}; the mean is ${duration(mean)}`;
}

// "stage 7", with its device if that has other stages.
function stageWord(figure, stage) {
  const device = figure.device_of_stage[stage];
  return stagesOn(figure, device).length > 1 ? `stage ${stage} of device ${device}` : `stage ${stage}`;
}

// The name of a lane's stage or device.
function laneWord(figure, stage) {
  return figure.joined ? deviceWord(figure, figure.device_of_stage[stage]) : `stage ${stage}`;
}

function deviceWord(figure, device) {
  const stages = stagesOn(figure, device);
  return stages.length === 1 ? `stage ${stages[0]}` : `device ${device} (stages ${list(stages)})`;
}

function explainEvent(figure, event) {
  if (event.what === "update") {
    return `weight update of ${stageWord(figure, event.stage)}: ${duration(event.end - event.start)}. ${GLOSSARY.update}`;
  }
  return `${shareWord(event.what)}, ${duration(event.end - event.start)} on ${stageWord(figure, event.stage)}.`;
}

function explainMemory(figure, stage, time) {
  const device = figure.device_of_stage[stage], spans = figure.ofDevice.get(device);
  const {weights, gradients, optimizer, buffers, workspace, held} = figure.device_memory[device];
  const at = spans.findLastIndex(span => span.start <= time);
  const now = at < 0 || time > spans.at(-1).end ? 0 : held[at];
  const all = weights + gradients + optimizer + buffers + workspace + now;
  return `${deviceWord(figure, device)} at ${duration(time)}: ${size(all)} = weights ${size(weights)} + gradients and ` +
    `optimizer ${size(gradients + optimizer)} + buffers ${size(buffers)} + activations ${size(now)} + workspace ` +
    `${size(workspace)}.`;
}

// The share of a step of the stage, or of all stages of its lane.
function explainStage(figure, stage) {
  const {stages} = drawn.get(figure.kind).rows[stage];
  if (stages.length === 1) return stageInWords(figure, stage);
  const shared = stages.map(one => `stage ${one} (${layersOf(figure, one).length} layers, ${duration(workOf(figure, one))})`);
  const work = stages.reduce((sum, one) => sum + workOf(figure, one), 0);
  return `${deviceWord(figure, figure.device_of_stage[stage])} has ${list(shared)}. It computes ${duration(work)} of a ` +
    `step of ${duration(figure.step_seconds)}, ${percent(work / figure.step_seconds)}.`;
}

function layersOf(figure, stage) {
  const first = figure.balance.slice(0, stage).reduce((sum, many) => sum + many, 0);
  return data.layers.slice(first, first + figure.balance[stage]).map(layer => layer.name);
}

function workOf(figure, stage) {
  return figure.timeline.spans[stage].reduce((sum, span) => sum + span.end - span.start, 0);
}

function stageInWords(figure, stage) {
  const work = workOf(figure, stage), names = layersOf(figure, stage);
  const shown = names.length > 5 ? [...names.slice(0, 2), `${names.length - 3} more`, names.at(-1)] : names;
  return `stage ${stage} has ${names.length} of ${data.layers.length} layers: ${list(shown)}. It computes ` +
    `${duration(work)} of a step of ${duration(figure.step_seconds)}, ${percent(work / figure.step_seconds)}.`;
}
