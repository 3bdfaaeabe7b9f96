// The state of the page, the address that says it, and the controls. runs.js has the data, panels.js
// draws them.

const names = [...RUNS.keys()];
const state = {run: names[0], beside: "", clock: "step", tick: 0, slot: null, stop: null, cells: "token"};
let ticks = [];       // of the clock: the steps of the shown runs, or the milliseconds at which they end
let pointed = null;   // the slot under the mouse or the keyboard; state.slot is the one that is held
let views = [];       // for each run that is shown {run, number, panels: {name: element}, now, states}
const inFrame = location.protocol === "about:";   // a notebook's frame has no address of its own
const $ = id => document.getElementById(id);

// --- the state, and the address -------------------------------------------------------------------

const shown = () => [state.run, state.beside].filter(Boolean).map(name => RUNS.get(name));
const valueOf = step => state.clock === "step" ? step.step : step.end;

function setTicks(value) {
  const values = shown().flatMap(run => run.steps.map(valueOf));
  ticks = [...new Set(values)].sort((a, b) => a - b);
  state.tick = Math.max(0, atMost(ticks, value + 1e-6) - 1);
}

function address() {
  const parts = new URLSearchParams({run: state.run});
  const {theme} = document.documentElement.dataset;
  if (state.beside) parts.set("beside", state.beside);
  parts.set(state.clock, ticks[state.tick]);
  if (state.slot) parts.set("slot", state.slot);
  if (state.stop !== null) parts.set("stop", state.stop + 1);
  if (state.cells !== "token") parts.set("cells", state.cells);
  if (theme) parts.set("theme", theme);
  return "#" + parts;
}

function readAddress() {                 // whatever it says: what does not exist is left out
  const parts = new URLSearchParams(location.hash.slice(1)), first = DATA.walk[0]?.show;
  const begin = parts.has("run") ? [parts.get("run"), parts.get("beside")]
    : first ? [first.run, first.beside] : names;
  state.run = RUNS.has(begin[0]) ? begin[0] : names[0];
  state.beside = RUNS.has(begin[1]) ? begin[1] : "";
  state.clock = parts.has("ms") ? "ms" : "step";
  state.cells = ["position", "wide"].includes(parts.get("cells")) ? parts.get("cells") : "token";
  setTheme(["dark", "light"].includes(parts.get("theme")) ? parts.get("theme") : "");
  const stop = parts.get("stop") - 1, {show} = DATA.walk[stop] ?? {};
  if (show && !parts.has("run")) return visit(stop);
  setTicks(Number(parts.get(state.clock)) || 0);
  state.slot = slotNamed(parts.get("slot")) ? parts.get("slot") : null;
  const there = show && show.run === state.run && (show.beside ?? "") === state.beside
    && state.clock === "step" && ticks[state.tick] === show.step;
  state.stop = there ? stop : null;
  build();
  lookAt();
}

function go(tick) {                      // to another moment
  tick = Math.max(0, Math.min(ticks.length - 1, tick));
  if (tick === state.tick) return;
  Object.assign(state, {tick, slot: null, stop: null});
  pointed = null;
  render();
}

function change(what) {                  // other runs, or another clock, at the same moment
  const value = ticks[state.tick], {k} = momentOf(RUNS.get(state.run), state.clock, value);
  const step = RUNS.get(state.run).steps[Math.max(k, 0)];
  Object.assign(state, what, {slot: null, stop: null});
  pointed = null;
  setTicks(what.clock ? valueOf(step) : value);
  build();
}

function visit(i) {                      // a stop of the walk
  const {run, beside, step, slot} = DATA.walk[i].show;
  Object.assign(state, {run, beside: beside ?? "", clock: "step", slot: slot ?? null, stop: i});
  pointed = null;
  setTicks(step);
  build();
  lookAt();
}

function lookAt() {                      // below the controls, which stay in sight
  const panel = document.querySelector(".look");
  if (!panel) return;
  panel.style.scrollMarginTop = $("transport").offsetHeight + 8 + "px";
  panel.scrollIntoView({block: "nearest"});
}

// A slot's name is "view.pass.row.column". Its four numbers, if there is such a slot.
function slotNamed(name) {
  const parts = (name ?? "").split(".").map(Number), run = shown()[parts[0]];
  return parts.join(".") === name && parts.length === 4 && run && slotAt(run, ...parts.slice(1)) ? parts : null;
}

// --- the panels -----------------------------------------------------------------------------------

const PANELS = {timeline: "Timeline", plan: "Plan of this step", tensor: "Tensor", sees: "Who sees whom",
                bill: "Bill so far", memory: "Memory", requests: "Requests"};

function build() {                       // everything anew: other runs, another width or theme
  const main = $("views");
  views = shown().map((run, number) => ({run, number, panels: {}, rows: new Map()}));
  main.className = views.length === 2 ? "two" : "one";
  main.replaceChildren();
  for (const [name, title] of Object.entries(PANELS)) {
    for (const view of views) {
      const heading = element("h2", {}, title);
      if (views.length === 2) heading.append(element("small", {}, " · " + view.run.name));
      view.panels[name] = element("div");
      const ariaLabel = `${title}, ${view.run.name}`;
      main.append(element("section", {className: "panel " + name, style: `--area: ${name}`, ariaLabel},
                          heading, view.panels[name]));
    }
  }
  for (const view of views) {
    view.panels.sees.ariaLive = "polite";
    drawTimeline(view);
  }
  render();
}

function render() {                      // what depends on the moment
  for (const view of views) {
    view.now = momentOf(view.run, state.clock, ticks[state.tick]);
    view.states = view.run.requests.map(request => stateOf(view.run, request, view.now));
    for (const draw of [moveCursor, drawPlan, drawTensor, drawBill, drawRequests, drawMemory]) draw(view);
  }
  drawPointed();
  drawControls();
  if (!inFrame) writeAddress();
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

// --- controls -------------------------------------------------------------------------------------

let timer = null;                        // while it plays

function drawControls() {
  for (const id of ["run", "beside", "clock", "cells"]) $(id).value = state[id];
  const value = ticks[state.tick], end = ticks.at(-1), stop = DATA.walk[state.stop];
  $("now").textContent = state.clock === "step" ? `step ${value} of ${end}` : `${ms(value)} of ${ms(end)}`;
  for (const node of document.querySelectorAll(".look")) node.classList.remove("look");
  for (const [i, button] of $("walk").querySelectorAll("button").entries()) {
    button.ariaCurrent = i === state.stop ? "step" : null;
  }
  $("stop").hidden = !DATA.walk.length;
  $("stop").className = stop ? "on" : "";
  $("stop").textContent = "New to batching? Take the guided walk.";
  $("on").hidden = !DATA.walk[(state.stop ?? -1) + 1];
  $("on").textContent = stop ? "next stop" : "guided walk";
  if (!stop) return;
  const [panel, number] = stop.look, {panels, run} = views[number];
  $("stop").textContent = `${stop.text} Look at: ${PANELS[panel]}, ${run.name}.`;
  panels[panel].parentNode.classList.add("look");
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
  if (target.closest("select") || event.ctrlKey || event.metaKey || event.altKey) return;
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

function seek(event) {                   // a press or a drag on the timeline
  const view = views.find(view => view.box.contains(event.target));
  if (!view || (event.type === "pointermove" && !event.buttons)) return;
  const value = view.valueAt(event.clientX - view.box.getBoundingClientRect().left);
  go(atMost(ticks, value) - (state.clock === "step"));
}

function begin() {
  const {requests} = DATA.runs[0], tokens = requests.reduce((sum, {prompt}) => sum + prompt.length, 0);
  $("about").textContent = `${plural(requests.length, "request")}, ${plural(tokens, "prompt token")}`;
  $("run").append(...names.map(name => element("option", {value: name}, name)));
  $("beside").append(...["", ...names].map(name => element("option", {value: name}, name || "nothing")));
  $("stages").hidden = names.length === 1;
  $("walk").hidden = !DATA.walk.length;
  $("walk").querySelector("ol").append(...DATA.walk.map(({title}, i) => element(
    "li", {}, element("button", {onclick: () => visit(i)}, `${i + 1} ${title}`))));
  const legend = [...Object.entries(DATA.names), ["past", "key in the cache"], ["new", "key of this pass"],
                  ["wrong", "seen, and must not be"]];
  $("legend").append(...legend.map(
    ([kind, name]) => element("span", {}, element("i", {className: kind}), name)));

  for (const id of ["run", "beside", "clock"]) $(id).onchange = () => change({[id]: $(id).value});
  $("cells").onchange = () => { state.cells = $("cells").value; render(); };
  $("speed").onchange = () => timer && play(true);
  $("theme").onclick = turnTheme;
  $("first").onclick = () => go(0);
  $("back").onclick = () => go(state.tick - 1);
  $("next").onclick = () => go(state.tick + 1);
  $("last").onclick = () => go(ticks.length - 1);
  $("play").onclick = () => play(!timer);
  $("on").onclick = () => visit((state.stop ?? -1) + 1);
  document.addEventListener("keydown", onKey);

  const main = $("views"), slotOf = event => event.target.dataset.slot ?? null;
  main.addEventListener("pointerover", event => {
    if (event.pointerType === "touch" || slotOf(event) === pointed) return;
    pointed = slotOf(event);
    drawPointed();
  });
  main.addEventListener("mousedown", event => slotOf(event) && event.preventDefault());   // keeps the focus
  main.addEventListener("click", event => slotOf(event) && hold(slotOf(event)));
  main.addEventListener("pointerdown", seek);
  main.addEventListener("pointermove", seek);
  let wide = innerWidth;
  addEventListener("resize", () => { if (innerWidth !== wide) { wide = innerWidth; build(); } });
  addEventListener("hashchange", () => { if (location.hash !== address()) readAddress(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", build);
  readAddress();
}

begin();
