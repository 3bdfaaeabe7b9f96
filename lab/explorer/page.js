// The state of the page, the address that says it, and the controls. runs.js has the data, panels.js
// draws them.

const names = [...RUNS.keys()];
const state = {run: names[0], beside: "", clock: "step", tick: 0, slot: null, cells: "token",
               stop: null, all: false,   // of the walk; and whether all panels are shown, not its scene only
               tried: null};             // "Try it": two stages and each knob's value, as indices
let ticks = [];       // of the clock: the steps of the shown runs, or the milliseconds at which they end
let pointed = null;   // the slot under the mouse or the keyboard; state.slot is the one that is held
const answered = new Map();   // stop -> the choice that was made there
let views = [];       // for each run that is shown {run, number, panels: {name: element}, now, states}
const $ = id => document.getElementById(id);

// --- the state, and the address -------------------------------------------------------------------

const inScene = () => state.tried === null && state.stop !== null && !state.all;

const asking = () => inScene() && Boolean(DATA.walk[state.stop].ask) && !answered.has(state.stop);
const sceneOf = i => DATA.walk[i].ask && !answered.has(i) ? DATA.walk[i].ask.show : DATA.walk[i].show;

function shown() {
  return state.tried ? state.tried.slice(0, 2).map(triedRun)
    : [state.run, state.beside].filter(Boolean).map(name => RUNS.get(name));
}

const valueOf = step => state.clock === "step" ? step.step : step.end;

function setTicks(value) {
  const values = shown().flatMap(run => run.steps.map(valueOf));
  ticks = [...new Set(values)].sort((a, b) => a - b);
  state.tick = Math.max(0, atMost(ticks, value + 1e-6) - 1);
}

function address() {
  const parts = new URLSearchParams(state.tried ? {try: state.tried.join(".")} : {run: state.run});
  const {theme} = document.documentElement.dataset;
  if (state.beside && !state.tried) parts.set("beside", state.beside);
  parts.set(state.clock, ticks[state.tick]);
  if (state.slot) parts.set("slot", state.slot);
  if (state.stop !== null) parts.set("stop", state.stop);
  if (state.stop !== null && state.all) parts.set("all", 1);
  if (state.cells !== "token") parts.set("cells", state.cells);
  if (theme) parts.set("theme", theme);
  return "#" + parts;
}

function readAddress() {                 // whatever it says: what does not exist is left out
  const parts = new URLSearchParams(location.hash.slice(1));
  const [run, beside = ""] = parts.has("run") ? [parts.get("run"), parts.get("beside")] : names;
  Object.assign(state, {run: RUNS.has(run) ? run : names[0], beside: RUNS.has(beside) ? beside : ""});
  state.clock = parts.has("ms") ? "ms" : "step";
  state.cells = ["position", "wide"].includes(parts.get("cells")) ? parts.get("cells") : "token";
  state.all = parts.has("all");
  if (["dark", "light"].includes(parts.get("theme"))) setTheme(parts.get("theme"));
  const stop = Number(parts.get("stop") ?? -1);
  state.stop = DATA.walk[stop] ? stop : null;
  state.tried = triedNamed(parts.get("try"));
  if (!state.tried && !parts.has("run") && DATA.walk.length) return visit(state.stop ?? 0, false);
  setTicks(Number(parts.get(state.clock)) || 0);
  state.slot = slotNamed(parts.get("slot")) ? parts.get("slot") : null;
  build();
}

function go(tick) {                      // to another moment
  tick = Math.max(0, Math.min(ticks.length - 1, tick));
  if (tick === state.tick) return;
  Object.assign(state, {tick, slot: null});
  pointed = null;
  render();
}

function change(what) {                  // other runs, or another clock, at the same moment
  const {k} = views[0].now, value = ticks[state.tick];
  Object.assign(state, what, {slot: null});
  pointed = null;
  const {steps} = shown()[0];            // another run may have fewer
  setTicks(what.clock ? valueOf(steps[Math.max(0, Math.min(k, steps.length - 1))]) : value);
  build();
}

function visit(i, news = true) {         // a stop of the walk; Back leads to where one was before
  if (news) leave();
  const {run, beside, clock, step, slot = null} = sceneOf(i);
  Object.assign(state, {run, beside, clock, slot, stop: i, all: false, tried: null, tab: 0});
  pointed = null;
  setTicks(valueOf(shown()[0].stepOf.get(step)));
  build();
  if (scrollY > $("walk").offsetTop) scrollTo(0, $("walk").offsetTop);
}

function strayed() {                     // whether another moment or run than the stop's is shown
  const {run, beside, clock, step, slot = null} = sceneOf(state.stop);
  return state.tried || state.run !== run || state.beside !== beside || state.clock !== clock
    || state.slot !== slot || views[0].now.step !== step;
}

function answer(choice) {
  answered.set(state.stop, choice);
  visit(state.stop, false);
}

// A slot's name is "view.pass.row.column". Its four numbers, if there is such a slot.
function slotNamed(name) {
  const parts = (name ?? "").split(".").map(Number), run = shown()[parts[0]];
  return parts.join(".") === name && parts.length === 4 && run && slotAt(run, ...parts.slice(1)) ? parts : null;
}

// --- the panels -----------------------------------------------------------------------------------

const PANELS = {timeline: "Timeline", plan: "Plan of this step", tensor: "Tensor", sees: "Who sees whom",
                bill: "Bill so far", memory: "Memory", requests: "Requests"};
const ONCE = {score: "Scoreboard", change: "Change of shape: from rows to a stream"};   // one panel for all runs
const DRAW = {timeline: moveCursor, plan: drawPlan, tensor: drawTensor, bill: drawBill, requests: drawRequests,
              memory: drawMemory};

function build() {                       // everything anew: other runs, another width or theme
  const main = $("views"), stop = inScene() ? DATA.walk[state.stop] : null;
  const scene = (state.tried ? ["score", "timeline"] : stop?.panels ?? Object.keys(PANELS)).filter(
    name => name !== "change" || !asking());
  views = shown().map((run, number) => ({run, number, panels: {}, rows: new Map()}));
  main.className = (views.length === 2 ? "two" : "one") + (state.tried || stop ? " scene" : "") + (asking() ? " asking" : "");
  main.replaceChildren();
  for (const name of scene) {
    for (const view of ONCE[name] ? [null] : views) {
      const panel = element("div"), title = PANELS[name] ?? ONCE[name], run = view?.run.name ?? "";
      const note = view ? run : name === "score" ? `${DATA.calculated}; longest waits, in ms` : `step ${sceneOf(state.stop).step}`;
      if (view) view.panels[name] = panel;
      main.append(element("section", {className: "panel " + name, style: `--area: ${name}`, ariaLabel: `${title}, ${run}`},
                          element("h2", {}, title, element("small", {}, " · " + note)), panel));
      if (name === "score") panel.append(scoreboardNow());
      if (name === "change") drawChange(panel, stop.change.runs.map(name => RUNS.get(name)), stop.show.step, stop.change.shapes);
    }
  }
  if (stop) {
    ((views[stop.look] ?? views[0]).panels[scene[0]]?.parentNode ?? main.firstChild).classList.add("look");
  }
  for (const view of views) {
    if (view.panels.sees) view.panels.sees.ariaLive = "polite";
    if (view.panels.timeline) drawTimeline(view);
  }
  drawLegend(scene);
  drawTabs(scene);
  render();
  const list = $("walk").firstChild, marked = list.querySelector("[aria-current]");
  if (marked) list.scrollLeft = marked.offsetLeft - 60;   // on a phone it scrolls sideways
}

function drawLegend(scene) {             // of what can be seen now
  const has = name => shown().some(run => run.totals[name].at(-1) > 0), sees = scene.includes("sees");
  const guesses = shown().some(({knobs}) => knobs.guesses);
  const kinds = {prefill: true, decode: true, recomputed: has("recomputed"), pad: has("pad_slots") || scene.includes("change"),
                 finished: has("finished_slots"), accepted: guesses, rejected: guesses, waiting: scene.includes("timeline"),
                 past: sees, new: sees, wrong: shown().some(({xray}) => sees && xray?.wrong)};
  const names = {...DATA.names, past: "seen: key in the cache", new: "seen: key of this pass", wrong: "seen, and must not be"};
  $("legend").replaceChildren(...Object.keys(kinds).filter(kind => kinds[kind]).map(
    kind => element("span", {}, element("i", {className: kind}), names[kind])));
}

function drawTabs(scene) {               // a phone shows one panel at a time; a slot and its keys belong together
  const names = scene.filter(name => name !== "sees");
  const open = tab => {
    state.tab = tab;
    for (const panel of $("views").children) {
      const name = panel.classList[1] === "sees" ? "tensor" : panel.classList[1];
      panel.classList.toggle("behind", name !== names[tab]);
    }
    for (const [i, button] of [...$("tabs").children].entries()) button.ariaPressed = String(i === tab);
  };
  $("tabs").replaceChildren(...names.map((name, i) => element(
    "button", {onclick: () => { open(i); render(); }}, (PANELS[name] ?? ONCE[name]).split(" ")[0])));
  open(Math.min(state.tab ?? 0, names.length - 1));
}

function render() {                      // what depends on the moment
  for (const view of views) {
    view.now = momentOf(view.run, state.clock, ticks[state.tick]);
    view.states = view.run.requests.map(request => stateOf(view.run, request, view.now));
    for (const name of Object.keys(view.panels)) DRAW[name]?.(view);
  }
  drawPointed();
  drawControls();
  writeAddress();
}

function scoreboardNow() {
  const pick = run => { leave(); state.all = true; change({run, beside: "", clock: "ms"}); };
  const ladder = Object.fromEntries(Object.entries(DATA.score).filter(([name]) => name !== "two requests"));
  return state.tried ? scoreboard(triedScores(), before) : scoreboard(ladder, null, pick);
}

// --- "Try it": other knobs, whose runs are in the page --------------------------------------------

const LABELS = {max_batch: "max_batch", token_budget: "token budget", page_size: "page size",
                memory: "memory, in tokens", long: "drop in two long prompts", mask: "break the mask"};
const expandedRuns = new Map();          // number of a run -> that run
const visited = [];                      // [stage, figures], of all choices
const reached = new Set();               // goals
let before = null;                       // the figures of the last choice

function settingOf(stage) {              // its name, and the indices of the knobs that it has
  const {applies, knobs} = DATA.grid, at = Object.keys(knobs);
  return [stage, ...applies[stage].map(knob => state.tried[2 + at.indexOf(knob)])].join(".");
}

function triedRun(i) {
  const name = DATA.grid.stages[i], number = DATA.grid.of[settingOf(name)];
  if (!expandedRuns.has(number)) expandedRuns.set(number, expanded(DATA.grid.runs[number], name));
  return expandedRuns.get(number);
}

const triedStages = () => state.tried.slice(0, 2).map(i => DATA.grid.stages[i]);
const triedScores = () => Object.fromEntries(triedStages().map(
  stage => [stage, DATA.grid.runs[DATA.grid.of[settingOf(stage)]].figures]));

function triedNamed(name) {              // its indices; null if there are no such runs
  if (!name || !DATA.grid) return null;
  const {stages, knobs} = DATA.grid, sizes = [stages, stages, ...Object.values(knobs), [0, 1]];
  const given = name.split(".").map(Number);
  return given.length === sizes.length && given.every((i, k) => i in sizes[k]) ? given : null;
}

function tryIt(tried) {
  if (!state.tried) leave();
  before = state.tried && triedScores();
  Object.assign(state, {tried, slot: null, clock: state.tried ? state.clock : "ms"});
  pointed = null;
  setTicks(Infinity);
  for (const [stage, figures] of Object.entries(triedScores())) {
    if (!visited.some(([, known]) => known === figures)) visited.push([stage, figures]);
    DATA.grid.goals.forEach((goal, i) => { if (meets(goal, stage, figures)) reached.add(i); });
  }
  build();
}

function meets(goal, stage, figures) {
  const {applies, knobs} = DATA.grid, value = knob => knobs[knob][state.tried[2 + Object.keys(knobs).indexOf(knob)]];
  return value("long") && (!goal.memory || (applies[stage].includes("memory") && value("memory") <= goal.memory))
    && ["next", "first", "speed"].every(key => !goal[key] || (goal[key][0] <= figures[key] && figures[key] <= goal[key][1]));
}

function beginTry() {                    // its controls
  const {stages, knobs, first, goals} = DATA.grid;
  const set = (k, value) => tryIt(Object.assign([...state.tried], {[k]: Number(value)}));
  const selects = [0, 1].map(k => element("select", {onchange: event => set(k, event.target.value)}, ...stages.map(
    (name, value) => element("option", {value}, name))));
  const inputs = [...Object.entries(knobs), ["mask", [false, true]]].map(([name, values], k) => {
    const kind = values.includes(true) ? {type: "checkbox", onchange: event => set(k + 2, event.target.checked)}
      : {type: "range", min: 0, max: values.length - 1, oninput: event => set(k + 2, event.target.value)};
    return element("label", {data: {knob: name}}, LABELS[name], element("input", kind), element("output"));
  });
  $("try").append(...selects.map((select, k) => element("label", {}, k ? "and" : "stage", select)), ...inputs, element("p"),
    element("ol", {id: "goals"}, ...goals.map(({text}) => element("li", {}, text))), element("figure", {id: "points"}));
  const button = element("button", {id: "tries", onclick: () => tryIt(state.tried ?? first)}, "try it");
  $("walk").firstChild.append(element("li", {}, button));
}

function drawTry() {
  $("try").hidden = !state.tried;
  if (!state.tried) return;
  const {knobs, applies, wrong} = DATA.grid, stages = triedStages();
  $("try").querySelectorAll("select").forEach((select, k) => { select.value = state.tried[k]; });
  $("try").querySelectorAll("[data-knob]").forEach((label, k) => {
    const value = state.tried[k + 2], [, input, output] = label.childNodes, {knob} = label.dataset;
    const having = stages.filter(stage => knob === "mask" || applies[stage].includes(knob));
    Object.assign(input, {value, checked: Boolean(value), disabled: !having.length});
    output.textContent = (input.type === "range" ? knobs[knob][value] : "")
      + (having.length === 1 && stages[0] !== stages[1] ? ` (${having[0]} only)` : "");
    label.className = having.length ? "" : "off";
  });
  const broken = state.tried.at(-1) ? [...new Set(stages)].map(stage => {
    const [n, of] = wrong[settingOf(stage)] ?? [];
    return of ? `${stage}: ${n} of ${of} requests WRONG, and this timeline is the same: nothing raises an error.`
      : `${stage}: has no such mask to break.`;
  }) : [];
  const free = stages.filter(stage => !applies[stage].includes("memory"));
  const said = $("try").querySelector("p");
  said.className = broken.length ? "bad" : "soft";
  said.textContent = broken.join(" ") || "This repository's stages ran with each combination, on a calculated A100."
    + (free.length ? ` No memory limit: ${[...new Set(free)].join(", ")}.` : "");
  for (const [i, item] of [...$("goals").children].entries()) item.className = reached.has(i) ? "reached" : "";
  drawPoints();
}

// All choices so far: the longest wait across, speed upwards, the stage's name at the point.
function drawPoints() {
  const wide = 300, high = 130, left = 34, x = wait => left + (wide - left - 12) * Math.min(wait, 60) / 60;
  const y = speed => high - 18 - (high - 30) * Math.min(speed, 600) / 600;
  const svg = (tag, attributes, text = "") => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    node.textContent = text;
    return node;
  };
  const {next, speed} = DATA.grid.goals[0], now = new Set(Object.values(triedScores()));
  const plot = svg("svg", {viewBox: `0 0 ${wide} ${high}`, role: "img",
                           "aria-label": `${visited.length} points: longest wait and speed of each choice`});
  plot.append(
    svg("rect", {x: x(0), y: y(600), width: x(next[1]) - x(0), height: y(speed[0]) - y(600), class: "goal"}),
    svg("path", {d: `M${x(0)} ${y(600)}V${y(0)}H${x(60)}`, class: "axes"}),
    ...[0, 300, 600].map(value => svg("text", {x: left - 4, y: y(value) + 4, "text-anchor": "end"}, value)),
    ...[15, 30, 45, 60].map(value => svg("text", {x: x(value), y: high - 4, "text-anchor": "middle"}, value)),
    svg("text", {x: left + 4, y: 10}, "tokens/s; across: longest wait, ms; shaded: goal 1"),
    ...visited.map(([stage, figures]) => svg(
      "text", {x: x(figures.next), y: y(figures.speed) + 4, "text-anchor": "middle", class: now.has(figures) ? "now" : ""},
      stage.split(",")[0])));
  $("points").replaceChildren(plot);
}

let written = -Infinity, later = null;

function writeAddress() {                // not at every step: browsers refuse 100 changes in 30 seconds
  clearTimeout(later);
  const wait = written + 400 - performance.now();
  if (wait > 0) later = setTimeout(writeAddress, wait);
  else {
    written = performance.now();
    history.replaceState(null, "", address());
  }
}

function leave() {                       // what is shown keeps its place in the browser's history
  play(false);
  clearTimeout(later);
  if (!views.length) return;
  history.replaceState(null, "", address());
  history.pushState(null, "", address());
  written = -Infinity;
}

// --- controls -------------------------------------------------------------------------------------

let timer = null;                        // while it plays

function drawControls() {
  for (const id of ["run", "beside", "clock", "cells"]) $(id).value = state[id];
  const value = ticks[state.tick], end = ticks.at(-1), {stop, tried} = state, {walk} = DATA;
  $("now").textContent = state.clock === "step" ? `step ${value} of ${end}`
    : `step ${views[0].now.step}: ${ms(value).slice(0, -3)} of ${ms(end)}`;
  for (const [i, button] of $("walk").querySelectorAll("button").entries()) {
    button.ariaCurrent = tried ? (button.id === "tries" ? "page" : null) : i === stop ? "step" : null;
  }
  const on = walk[stop], away = Boolean(on && strayed());
  $("stop").hidden = !walk.length || Boolean(tried);
  drawStop(on);
  $("controls").hidden = Boolean(tried) || inScene();
  $("all").hidden = !on || Boolean(tried);
  $("all").textContent = state.all ? "this scene only" : "all panels";
  $("return").hidden = !away;
  $("return").textContent = `back to stop ${stop}`;
  $("on").hidden = away || !walk[(stop ?? -1) + 1] || Boolean(tried && !on);
  $("on").textContent = on ? "next stop" : "guided walk";
  drawTry();
}

function drawStop(on) {                  // its question, or its text
  const said = !on ? "" : [state.stop, asking(), answered.get(state.stop)].join();
  if ($("stop").dataset.said === said) return;
  $("stop").dataset.said = said;
  $("stop").className = on ? "on" : "";
  const {question, choices, right} = on?.ask ?? {}, choice = answered.get(state.stop);
  const before = choice === undefined ? "" : choice === right ? "Right. " : choice === null ? "" : `Not ${choices[choice]}. `;
  $("stop").replaceChildren(...!on ? ["New to batching? Take the guided walk."]
    : !asking() ? [before, on.text] : [question, div("choices", ...choices.map((text, i) => element(
      "button", {onclick: () => answer(i)}, text)), element("button", {onclick: () => answer(null)}, "show me"))]);
}

function play(on) {
  clearInterval(timer);
  if (on && state.tick === ticks.length - 1) go(0);
  timer = on ? setInterval(() => state.tick < ticks.length - 1 ? go(state.tick + 1) : play(false),
                           1000 / $("speed").value) : null;
  $("play").textContent = on ? "pause" : "play";
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  document.documentElement.style.colorScheme = theme || "light dark";
}

function turnTheme() {
  const dark = document.documentElement.dataset.theme === "dark" || (
    !document.documentElement.dataset.theme && matchMedia("(prefers-color-scheme: dark)").matches);
  setTheme(dark ? "light" : "dark");
  build();
}

function faster(by) {
  const {options, selectedIndex} = $("speed");
  $("speed").selectedIndex = Math.max(0, Math.min(options.length - 1, selectedIndex + by));
  if (timer) play(true);
}

const hold = name => { state.slot = name && state.slot !== name ? name : null; render(); };
const KEYS = {
  ArrowLeft: far => go(state.tick - far), ArrowRight: far => go(state.tick + far), Home: () => go(0),
  End: () => go(ticks.length - 1), "+": () => faster(1), "-": () => faster(-1),
  " ": () => play(!timer), Escape: () => { pointed = null; hold(null); }};
const MOVES = {ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0]};

function onKey(event) {
  const {target, key} = event, grid = target.closest(".grid"), {activeElement} = document;
  if (target.closest("select, input") || event.ctrlKey || event.metaKey || event.altKey) return;
  if (key === " " && target.closest("button, summary")) return;
  if (grid && MOVES[key]) {
    const here = slotNamed(pointed ?? state.slot);
    const [view, pass] = [Number(grid.dataset.view), Number(grid.dataset.pass)];
    const [row, column] = here && here[0] === view && here[1] === pass
      ? [here[2] + MOVES[key][0], here[3] + MOVES[key][1]] : [0, 0];
    const name = [view, pass, row, column].join(".");
    if (views[view].slots.has(name)) {
      pointed = name;
      views[view].slots.get(name).scrollIntoView({block: "nearest", inline: "nearest"});
      drawPointed();
    }
  } else if (grid && key === "Enter") {
    const {view, pass} = grid.dataset;
    hold(pointed);
    document.querySelector(`.grid[data-view="${view}"][data-pass="${pass}"]`)?.focus();
  } else if (KEYS[key]) {
    KEYS[key](event.shiftKey ? 10 : 1);
    if (activeElement !== document.body && !activeElement.isConnected) $("play").focus();
  } else return;
  event.preventDefault();
}

function swipe(event) {                  // sideways, to the next stop or back
  const {clientX, clientY} = event.changedTouches[0], {target} = event;
  const slides = target.closest(".box, input, select") || [target.closest(".scroll")].some(
    box => box && box.scrollWidth > box.clientWidth + 1);
  if (event.type === "touchstart") return void (touched = slides || state.stop === null ? null : [clientX, clientY]);
  if (!touched) return;
  const [right, down] = [clientX - touched[0], clientY - touched[1]], i = state.stop + (right < 0 ? 1 : -1);
  if (Math.abs(right) > 60 && Math.abs(right) > 2 * Math.abs(down) && DATA.walk[i] && !state.tried) visit(i);
}

function nearest(event) {                // the slot that is meant: between two, or on a narrow one
  const grid = event.target.closest(".grid");
  if (!grid || event.target.dataset.slot) return event.target.dataset.slot ?? null;
  const {clientX, clientY} = event, far = node => {
    const {left, right, top, bottom} = node.getBoundingClientRect();
    return Math.hypot(clientX - (left + right) / 2, clientY - (top + bottom) / 2);
  };
  return [...grid.querySelectorAll(".slot")].reduce((a, b) => far(b) < far(a) ? b : a).dataset.slot;
}

let touched = null;                      // where a swipe has begun

function seek(event) {                   // a press or a drag on the timeline; else it says what is there
  const view = views.find(view => view.box?.contains(event.target)), moved = event.type === "pointermove";
  for (const {tip} of views) tip?.remove();
  if (!view) return;
  const {left, top, width} = view.box.getBoundingClientRect(), across = event.clientX - left;
  const value = view.valueAt(across), request = view.rowAt(event.clientY - top);
  if (!moved || event.buttons) return go(atMost(ticks, value) - (state.clock === "step"));
  if (value < 0) return;
  const now = momentOf(view.run, state.clock, state.clock === "step" ? Math.floor(value) : value);
  const step = view.run.steps[now.k], {active, kind, words} = request ? stateOf(view.run, request, now) : {};
  const is = active || ["absent", "waiting", "done"].includes(kind) ? words : "waits";
  const text = `step ${now.step}` + (step && now.passes.length ? `, ${ms(step.end - step.start)}` : "")
    + (request ? `: ${request.name} ${is}` : `: ${plural(step ? inStep(view.run, "slots", step) : 0, "slot")}`);
  view.tip = div("tip", text);
  view.box.append(view.tip);
  view.tip.style.left = Math.max(0, Math.min(across + 12, width - view.tip.offsetWidth)) + "px";
  view.tip.style.top = event.clientY - top + 14 + "px";
}

function begin() {
  const {requests} = RUNS.get(names[0]), tokens = requests.reduce((sum, {prompt}) => sum + prompt.length, 0);
  $("about").textContent = `${plural(requests.length, "request")}, ${plural(tokens, "prompt token")}`;
  const options = list => list.map(value => element("option", {value}, value || "nothing"));
  $("run").append(...options(names));
  $("beside").append(...options(["", ...names]));
  $("stages").hidden = names.length === 1;
  $("walk").hidden = !DATA.walk.length;
  $("clock").options[1].textContent = DATA.calculated ? "ms, calculated for an A100" : "ms, measured";
  $("walk").querySelector("ol").append(...DATA.walk.map(({title}, i) => element(
    "li", {}, element("button", {onclick: () => visit(i)}, `${i} ${title}`))));
  if (DATA.grid) beginTry();
  for (const id of ["run", "beside", "clock"]) $(id).onchange = () => change({[id]: $(id).value});
  $("cells").onchange = () => { state.cells = $("cells").value; render(); };
  $("speed").onchange = () => timer && play(true);
  $("theme").onclick = turnTheme;
  $("first").onclick = () => go(0);
  $("back").onclick = () => go(state.tick - 1);
  $("next").onclick = () => go(state.tick + 1);
  $("last").onclick = () => go(ticks.length - 1);
  $("play").onclick = () => play(!timer);
  $("on").onclick = () => {
    visit((state.stop ?? -1) + 1);
    if ($("on").hidden) $("walk").querySelector("[aria-current]").focus();   // it is the last one
  };
  $("return").onclick = () => visit(state.stop);
  $("all").onclick = () => { state.all = !state.all; build(); };
  for (const type of ["touchstart", "touchend"]) document.addEventListener(type, swipe, {passive: true});
  document.addEventListener("keydown", onKey);

  const main = $("views"), slotOf = event => event.target.dataset.slot ?? null;
  main.addEventListener("pointerover", event => {
    if (event.pointerType === "touch" || slotOf(event) === pointed) return;
    pointed = slotOf(event);
    drawPointed();
  });
  main.addEventListener("mousedown", event => slotOf(event) && event.preventDefault());   // keeps the focus
  main.addEventListener("click", event => nearest(event) && hold(nearest(event)));
  main.addEventListener("pointerdown", seek);
  main.addEventListener("pointermove", seek);
  main.addEventListener("pointerleave", seek);
  let wide = innerWidth;
  addEventListener("resize", () => { if (innerWidth !== wide) { wide = innerWidth; build(); } });
  addEventListener("popstate", () => { play(false); readAddress(); });
  addEventListener("hashchange", () => { if (location.hash !== address()) readAddress(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", build);
  readAddress();
}

begin();
