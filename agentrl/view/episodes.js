"use strict";
// The trajectory browser: a step, its episodes, one of them token by token. Uses charts.js.

const steps = data.episodes.steps;
const picker = document.getElementById("step");
const slider = document.getElementById("slider");
const list = document.getElementById("list");
const page = document.getElementById("episode");

function rewardMark(reward) {
  const kind = reward === null ? "quiet" : reward > 0 ? "good" : "bad";
  return element("b", { class: kind, text: reward === null ? "not scored" : number(reward) });
}

function showStep(index) {
  picker.value = slider.value = index;
  const step = steps[index];
  const left = step.episodes_in_step - step.episodes.length;
  document.getElementById("shown").textContent =
    `${step.episodes.length} of ${step.episodes_in_step} episodes`
    + (left ? "; the others are in the run's trajectories folder" : "")
    + (data.episodes.steps_in_run > steps.length
      ? ` · ${steps.length} of ${data.episodes.steps_in_run} steps on this page` : "");
  list.replaceChildren(...step.episodes.map((episode, at) => {
    const button = element("button", { type: "button", children: [
      element("span", { children: [
        document.createTextNode(episode.rollout_id || `episode ${at + 1}`),
        element("br"),
        element("span", { class: "quiet", text: `${episode.num_turns} turns · ${episode.stop_reason}` }),
      ] }),
      rewardMark(episode.reward),
    ] });
    button.onclick = () => showEpisode(episode, button);
    return element("li", { children: [button] });
  }));
  if (step.episodes.length) list.querySelector("button").click();
  else page.replaceChildren(element("p", { class: "quiet", text: "No episode of this step was kept with its text (log.trajectories)." }));
}

function fact(name, value) {
  return element("span", { class: "fact", children: [document.createTextNode(`${name} `), value] });
}

function facts(episode) {
  const plain = (value) => element("b", { text: number(value) });
  const shown = [
    fact("reward", rewardMark(episode.reward)),
    fact("stopped", plain(episode.stop_reason)),
    fact("turns", plain(episode.num_turns)),
    fact("sampled tokens", plain(episode.num_sampled)),
    fact("example", plain(episode.example_id)),
    fact("group", plain(episode.group_id)),
  ];
  if (episode.score !== null) shown.splice(1, 0, fact("score", plain(episode.score)));
  for (const [name, value] of Object.entries(episode.seconds)) shown.push(fact(`${name} s`, plain(value)));
  for (const [name, value] of Object.entries(episode.metrics)) shown.push(fact(name, plain(value)));
  return element("div", { class: "facts", children: shown });
}

function block(kind, title, notes, content) {
  return element("section", { class: `block ${kind}`, children: [
    element("header", { children: [
      element("b", { text: title }), ...notes.map((text) => element("span", { text })),
    ] }),
    content,
  ] });
}

function sampled(segment) {
  const text = element("pre");
  segment.tokens.forEach((token, index) => {
    const logprob = segment.logprobs ? segment.logprobs[index] : null;
    const doubt = logprob === null ? 0 : 1 - Math.exp(logprob);
    const mark = element("span", { class: "token", text: token, style: `--doubt:${doubt.toFixed(3)}` });
    const about = logprob === null ? "no log-probability"
      : `log-probability ${number(logprob)}\nprobability ${number(Math.exp(logprob))}`;
    mark.onmouseenter = (event) => showTip(event, `${JSON.stringify(token)}\n${about}`);
    mark.onmouseleave = hideTip;
    text.append(mark);
  });
  const notes = [`${segment.tokens.length} tokens`, `ended by ${segment.finish_reason}`, `policy version ${segment.version}`];
  if (segment.cached_tokens) notes.push(`${segment.cached_tokens} tokens cached`);
  if (segment.reward !== null) notes.push(`reward ${number(segment.reward)}`);
  return block("policy", `policy, turn ${segment.turn}`, notes, text);
}

function tokens(episode) {
  const parts = [];
  episode.sequences.forEach((segments, at) => {
    if (episode.sequences.length > 1) parts.push(element("h3", { text: `sequence ${at + 1} of ${episode.sequences.length}` }));
    segments.forEach((segment, index) => {
      if (segment.tokens) parts.push(sampled(segment));
      else parts.push(block(index ? "environment" : "prompt", index ? "environment" : "prompt", [], element("pre", { text: segment.context })));
    });
  });
  if (episode.tokens_cut) parts.push(element("p", { class: "quiet", text: `${number(episode.tokens_cut)} more tokens are left out to keep this page small.` }));
  return parts;
}

function messages(episode) {
  const known = ["system", "developer", "user", "assistant", "tool"];
  return episode.messages.map(({ role, text }) => (
    block(known.includes(role) ? role : "prompt", role || "message", [], element("pre", { text }))
  ));
}

function showEpisode(episode, button) {
  for (const other of list.querySelectorAll("button")) other.setAttribute("aria-current", other === button);
  const body = element("div");
  const views = { Tokens: tokens };
  if (episode.messages.length) views.Messages = messages;
  const tabs = Object.entries(views).map(([name, view]) => {
    const tab = element("button", { type: "button", text: name });
    tab.onclick = () => {
      for (const other of tabs) other.setAttribute("aria-pressed", other === tab);
      body.replaceChildren(...view(episode));
    };
    return tab;
  });
  page.replaceChildren(facts(episode));
  if (episode.error) page.append(element("pre", { class: "error", text: episode.error }));
  page.append(element("div", { class: "tabs", children: tabs }), body);
  tabs[0].click();
}

if (steps.length) {
  steps.forEach((step, index) => {
    picker.append(element("option", { value: index, text: `${step.step}${step.evaluation ? " (evaluation)" : ""}` }));
  });
  slider.max = steps.length - 1;
  picker.onchange = () => showStep(picker.value);
  slider.oninput = () => showStep(slider.value);
  showStep(steps.length - 1);
} else {
  document.querySelector("#episodes .picker").remove();
  page.replaceChildren(element("p", { class: "quiet", text: "No trajectories yet." }));
}
