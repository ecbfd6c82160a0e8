// The challenge of a preset: goals for the setting, judged by the step that is simulated.
const GOALS = { // of each: what is asked for in words, what the step has, whether that is enough
  faster: (wanted, figure) => [`at least ${decimal(wanted)} \u00d7 as fast as ${data.than ?? "this preset's own setting"}`,
    Number((state.asItRan.step_seconds / figure.step_seconds).toFixed(2)), wanted, value => `${value.toFixed(2)} \u00d7`],
  idle: (wanted, figure) => [`devices idle for at most ${percent(wanted)} of the step`,
    -idleShare(figure), -wanted, value => percent(-value)],
  gib: (wanted, figure) => [`at most ${decimal(wanted)} GiB on each device`,
    -fullestPeak(figure), -wanted * 2 ** 30, value => size(-value)],
  devices: (wanted, figure) => [`on ${wanted} device${wanted > 1 ? "s" : ""}`,
    -Math.abs(figure.ofDevice.size - wanted), 0, () => String(figure.ofDevice.size)],
};

function showChallenge() {
  const {challenge} = data;
  if (!challenge) return;
  const {figure} = state, list = field("challenge-goals");
  field("challenge").hidden = false;
  field("challenge-text").textContent = "Find a setting that reaches all of these at once:";
  const goal = (met, text) => {
    const line = list.appendChild(document.createElement("li"));
    line.className = met ? "met" : "unmet";
    line.textContent = `${met ? "\u2713" : "\u2717"} ${text}`;
  };
  list.replaceChildren();
  let all = !state.problem;
  for (const [name, wanted] of Object.entries(challenge)) {
    const [text, value, least, shown] = GOALS[name](wanted, figure), met = value >= least && !state.stale;
    goal(met, state.stale ? text : `${text}: now ${shown(value)}`);
    all &&= met;
  }
  if (state.problem) goal(false, state.stale ? "a step that can run" : "within the memory of the devices");
  if (data.answer) {
    field("answer").href = `#preset=${data.preset.name}&${data.answer}`;
    field("answer").textContent = data.answer.replaceAll("&", ", ").replaceAll("=", " = ");
  }
  const text = all ? "\u2713 met" : "";
  if (field("challenge-met").textContent !== text) field("challenge-met").textContent = text;
}
