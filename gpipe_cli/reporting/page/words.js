// Numbers and terms in words, as the tables of the command line have them.
const KIND_WORDS = {F: "forward", R: "recompute", B: "backward", I: "backward for inputs", W: "backward for weights"};
const IDLE = ["bubble", "imbalance", "transfer", "set_up"];
const ORDERS = {
  gpipe: "all forwards, then all backwards: as in the paper",
  "1f1b": "each backward as early as possible, alternating with forwards",
  interleaved: "1f1b with several non-adjacent stages per device",
  zero_bubble: "1f1b with each backward split in two: weight gradients (W) fill idle time",
  zbv: "hardly any bubble: two stages per device, placed along a V, and split backwards",
  v_half: "as zbv, with half the activations",
  v_min: "as zbv, with a third of the activations",
  auto: "an order found by search for these layer times and this memory limit",
  file: "the order in the run's schedule file",
};
const PLACEMENTS = {
  neighbours: "each device has consecutive stages, as in the paper",
  looped: "micro-batches pass through all P devices several times: the first device has stages 0, P, 2P, \u2026",
  v: "micro-batches go to the last device and come back: the first device also has the last stage",
  "as planned": "as in the plan's placement file",
};
const RECOMPUTES = {
  never: "keeps the activations of all micro-batches",
  except_last: "recomputes all micro-batches except those whose backward comes right after their forward: with gpipe the " +
    "last one, with 1f1b all on the last stage",
  always: "recomputes every micro-batch, as in the paper",
  auto: "recomputes as few micro-batches as the memory allows; with settings other than the plan's: none, or as " +
    "except_last if that does not fit",
};
const GLOSSARY = {
  stage: "A part of the model: some consecutive layers. It has its own device, or shares one with other stages. Each " +
    "stage has a row; non-adjacent stages of one device share a row, in which later stages are drawn lower.",
  placement: "Which stages each device has, if devices have several. Nothing is sent between stages of the same device.",
  "1F0": "The full name of an action: its stage, its kind, its micro-batch. 1F0 is F0 in the row of stage 1.",
  "micro-batch": "One of the M pieces of a mini-batch, as equal as possible. While one stage works on a piece, " +
    "the next stage can work on the piece before it. That is what makes a pipeline fast.",
  forward: "F: a stage computes its outputs for a micro-batch, and sends them to the next stage.",
  backward: "B: a stage computes the gradients of a micro-batch, and sends those of its inputs to the previous stage. " +
    "If it is split in two, I computes the gradients that are sent, and W those of the weights, for which no stage waits.",
  recompute: "R: the forward pass again. A stage that does not keep the activations of a micro-batch saves memory, " +
    "but must compute them again before its backward.",
  activations: "What the forward pass must keep for the backward pass: most of the memory while many micro-batches are in " +
    "flight.",
  memory: "What a device holds for its stages: weights, gradients, optimizer state, buffers for sums over replicas and " +
    "for checkpoints, the workspace of one layer, and activations. The memory of the libraries and of the process itself " +
    "is not included.",
  schedule: "Which actions each device performs, and in which order.",
  "1F1B": "A schedule: each backward as early as possible, alternating with forwards. At most K micro-batches are in " +
    "flight, so a stage keeps fewer activations than in GPipe's order.",
  bubble: "Idle time that even equal stages would have, as the pipeline fills and drains: at first the last stages wait " +
    "for work, then the first stages wait for gradients. With equal stages, gpipe or 1f1b, and no recomputation its share " +
    "is (K-1)/(M+K-1): more micro-batches make it smaller. All idle time that is not imbalance, transfer or set-up " +
    "counts as bubble.",
  imbalance: "Idle time because stages have unequal work, and wait for the slowest one.",
  transfer: "Time in which a stage waits for tensors that have been computed but are still on their way over the link.",
  "set-up": "The rest of a step, before and after the actions: fetching data, starting the work.",
  update: "The optimizer updates the weights, once per step.",
};

// The owner of the original setting.
function owner() {
  return data.run ? "run" : "plan";
}

// Whether devices share cores or memory, and so slow each other down.
function devicesShare() {
  return data.slowdown.at_once !== null || data.slowdown.factor !== 1;
}

function duration(seconds) {
  if (seconds < 0) return "-" + duration(-seconds);
  if (seconds > 0 && seconds < 0.99995e-4) return `${(1e6 * seconds).toFixed(1)} \u00b5s`;
  if (seconds < 0.9995) return `${(1000 * seconds).toFixed(1)} ms`;
  if (seconds < 9.995) return `${seconds.toFixed(2)} s`;
  if (seconds < 59.95) return `${seconds.toFixed(1)} s`;
  const minutes = Math.floor(Math.round(seconds) / 60), rest = Math.round(seconds) % 60;
  if (minutes < 60) return `${minutes} min ${String(rest).padStart(2, "0")} s`;
  return `${Math.floor(minutes / 60)} h ${String(minutes % 60).padStart(2, "0")} min`;
}

function size(bytes) {
  for (const [power, unit] of [[3, "GiB"], [2, "MiB"], [1, "KiB"]]) {
    if (bytes >= 1024 ** power) return `${(bytes / 1024 ** power).toFixed(1)} ${unit}`;
  }
  return `${Math.round(bytes)} B`;
}

function percent(share) {
  return `${(100 * share).toFixed(1)} %`;
}

function decimal(value) {
  return value.toLocaleString("en", {maximumSignificantDigits: value < 1000 ? 3 : 4});
}

function shareWord(name) {
  return name.replace("_", "-");
}

// "13 % shorter"; "as long" if the difference would be shown as 0.
function difference(value, of, less, more, same) {
  const change = value / of - 1;
  return Math.abs(change) < 0.0005 ? same : `${percent(Math.abs(change))} ${change < 0 ? less : more}`;
}

function capital(text) {
  return text[0].toUpperCase() + text.slice(1);
}

// "1, 2 and 5"
function list(parts) {
  return parts.length < 2 ? parts.join("") : `${parts.slice(0, -1).join(", ")} and ${parts.at(-1)}`;
}
