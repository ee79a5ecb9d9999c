"use strict";
// Shows the facts that came with the page, then reads status.json again and again. Every text goes
// in as text, never as markup.

const PAUSE = 2000;
const at = (id) => document.getElementById(id);

function say(id, text) {
  if (at(id).textContent !== text) at(id).textContent = text;
}

function number(value, digits = 3) {
  const read = Number(value);
  return Number.isFinite(read) ? String(Number(read.toPrecision(digits))) : String(value);
}

function size(count) {
  return count >= 1e5 ? `${(count / 1e6).toFixed(3)} MB` : `${(count / 1e3).toFixed(1)} kB`;
}

function span(seconds) {
  if (seconds < 90) return `${Math.round(seconds)} s`;
  return seconds < 5400 ? `${Math.round(seconds / 60)} min` : `${(seconds / 3600).toFixed(1)} h`;
}

function result(metric, value) {
  return metric === "accuracy" ? `${(100 * value).toFixed(1)} %` : number(value, 4);
}

function element(name, text, properties = {}) {
  const made = document.createElement(name);
  made.textContent = text;
  for (const [key, value] of Object.entries(properties)) made.setAttribute(key, value);
  return made;
}

function notice(severity, badge, title, text) {
  const item = element("li", "", { class: `notice ${severity}` });
  const body = document.createElement("div");
  body.append(element("strong", title), " ", element("span", text));
  item.append(element("span", badge, { class: "badge" }), body);
  return item;
}

function behind(name, facts) {
  const peer = facts.peers.find((each) => each.name === name);
  return peer?.waits_for?.length ? `${name} (which waits for ${peer.waits_for.join(", ")})` : name;
}

function notices(facts) {
  const found = [];
  if (facts.phase === "failed") found.push(notice("danger", "Failed", "This start has failed.", "Its last lines say why."));
  if (facts.waiting_for.length && facts.waiting_seconds >= 3) {
    const names = facts.waiting_for.map((name) => behind(name, facts));
    const text = `${names.join(", ")}, for ${span(facts.waiting_seconds)} now. Nothing is lost: training goes on when they are back.`;
    found.push(notice("caution", "Waiting", "Waiting for", text));
  }
  return found;
}

function figures(facts) {
  document.title = `${facts.party}: round ${facts.round} of ${facts.rounds}`;
  say("party", facts.party);
  say("federation", `federation ${facts.federation} · version ${facts.version} · ${facts.words}`);
  say("round", String(facts.round));
  say("steps", `of ${facts.rounds} · step ${facts.step} of ${facts.steps} · ${facts.releases} releases`);
  at("progress").value = facts.rounds ? facts.round / facts.rounds : 0;
  say("phase", facts.phase);
  say("since", `for ${span(facts.now - facts.started)} since this start`);
  say("metric", facts.metric ? facts.metric[0].toUpperCase() + facts.metric.slice(1).replaceAll("_", " ") : "Test result");
  say("score", facts.metric ? result(facts.metric, facts.score) : "–");
  say("scored", facts.metric ? `own model, public test data, step ${facts.scored_at}` : "no public test data were given");
  say("epsilon", number(facts.epsilon));
  say("budget", `of ${number(facts.epsilon_budget)} · δ = ${number(facts.delta)}`);
  at("spent").value = Math.min(Number(facts.epsilon) / facts.epsilon_budget, 1) || 0;
  say("bytes", size(facts.bytes_per_edge));
  say("waiting", `${Math.round(100 * facts.waiting_share)} %`);
}

function peerRows(peer, facts) {
  const waited = facts.waiting_for.includes(peer.name) && facts.waiting_seconds >= 3;
  const row = element("tr", "", { class: `${peer.problem ? "troubled" : ""} ${waited ? "waited" : ""}` });
  const heard = peer.last_heard === null ? "never" : `${span(Math.max(facts.now - peer.last_heard, 0))} ago`;
  const edges = peer.sends && peer.hears ? "both ways" : peer.sends ? "is heard here" : "hears this party";
  row.append(
    element("th", peer.name, { scope: "row" }),
    element("td", peer.connected ? "connected" : "no line", { class: peer.connected ? "on" : "off" }),
    element("td", heard, { "data-name": "heard" }),
    element("td", peer.lag === 1 ? "1 round" : `${peer.lag} rounds`, { "data-name": "lag" }),
    element("td", size(peer.bytes_in), { "data-name": "in" }),
    element("td", size(peer.bytes_out), { "data-name": "out" }),
    element("td", edges),
  );
  if (!peer.problem) return [row];
  const trouble = element("tr", "", { class: "problem" });
  trouble.append(element("td", peer.problem, { colspan: 7 }));
  return [row, trouble];
}

function shape(name, properties, text = "") {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(properties)) made.setAttribute(key, value);
  made.textContent = text;
  return made;
}

function curve(facts) {
  at("curve-section").hidden = facts.curve.length < 2;
  if (facts.curve.length < 2) return;
  const values = facts.curve.map(([, value]) => Number(value));
  const lowest = Math.min(...values), highest = Math.max(...values), gap = highest - lowest || 1;
  const x = (step) => 92 + (528 * step) / Math.max(facts.steps, 1);
  const y = (value) => 22 + 160 * (1 - (value - lowest) / gap);
  const line = facts.curve.map(([step, value], k) => `${k ? "L" : "M"}${x(step).toFixed(1)} ${y(value).toFixed(1)}`).join("");
  const [last, score] = facts.curve[facts.curve.length - 1];
  const parts = [highest, lowest].flatMap((value) => [
    shape("line", { x1: 92, x2: 620, y1: y(value), y2: y(value) }),
    shape("text", { x: 84, y: y(value) + 5, "text-anchor": "end" }, result(facts.metric, value)),
  ]);
  at("curve").replaceChildren(
    ...parts,
    shape("path", { d: line }),
    shape("circle", { cx: x(last), cy: y(score), r: 4 }),
    shape("text", { x: 92, y: 212 }, "step 0"),
    shape("text", { x: 620, y: 212, "text-anchor": "end" }, `step ${facts.steps}`),
  );
  say("curve-caption", `${facts.metric.replaceAll("_", " ")} after step ${last}: ${result(facts.metric, score)}`);
}

function show(facts) {
  if (!facts.party) return;
  figures(facts);
  at("notices").replaceChildren(...notices(facts));
  at("peers").replaceChildren(...facts.peers.flatMap((peer) => peerRows(peer, facts)));
  curve(facts);
  at("log").replaceChildren(...facts.log.toReversed().map((line) => element("li", line)));
}

async function refresh() {
  try {
    const answer = await fetch("status.json", { signal: AbortSignal.timeout(4000) });
    if (!answer.ok) throw new Error(String(answer.status));
    show(await answer.json());
  } catch (error) {
    say("phase", "not answering");
    at("notices").replaceChildren(notice("danger", "Gone", "The party does not answer.", "It has ended, or was killed; what is below is what it said last. `dpcsgp party status` tells which."));
  }
  setTimeout(refresh, document.hidden ? 5 * PAUSE : PAUSE);
}

try {
  show(JSON.parse(at("first").textContent));
} catch (error) {
  // The run has not begun: there are none yet.
}
refresh();
