"use strict";
// The live page: keeps the last steps that the server tells of, and draws them as if they were a
// recorded run, with the explorer's functions in runs.js and panels.js. live.py says what a
// note holds. Whatever comes from a prompt enters the page as textContent.

const $ = id => document.getElementById(id);
const state = {clock: "step", cells: "token"};   // what panels.js asks for, as of page.js
const valueOf = step => step.step, shown = () => [view.run];
const requests = new Map();              // name -> what is known of it
let hello = null;                        // the server's first message
let simulate = null, scored = -Infinity;  // of schedule.js; when the stages were compared
import("/schedule.js").then(module => { simulate = module.simulate; });
let moments = [];                        // the last hello.kept steps, as the notes have them
let waiting = [], running = 0, pace = 0, paused = false, boxes = [], view = null, drawing = false;

// --- what the server tells ------------------------------------------------------------------------

const sinceStart = seconds => 1e3 * (seconds - hello.started);

function take({new: arrived, tokens, tables, ended, pass, cached, waiting: queue}) {
  for (const {name, prompt, generated, arrival, max_new_tokens, asked, token_steps, token_times} of arrived) {
    requests.set(name, {name, prompt, generated, arrival, limit: max_new_tokens, arrived: sinceStart(asked),
                        steps: token_steps, ms: token_times.map(sinceStart), reason: null});
  }
  for (const [name, token] of tokens) {
    const request = requests.get(name);
    request.generated.push(token);
    request.steps.push(pass.step);
    request.ms.push(sinceStart(pass.start + pass.seconds));
  }
  for (const [name, reason] of Object.entries(ended)) requests.get(name).reason = reason;
  waiting = queue;
  running = Object.keys(tables).length;
  if (!pass) return;
  moments.push({...pass, start: sinceStart(pass.start), ms: 1e3 * pass.seconds, tables, cached});
  moments = moments.slice(-hello.kept);
  const first = moments[0].step;
  for (const [name, {reason, steps}] of requests) {
    const asked = boxes.some(box => box.name === name);
    if (reason && !asked && (steps.at(-1) ?? -1) < first) requests.delete(name);
  }
}

// The last steps as the data of an explorer page, see lab/explorer/page.py. The first is step 0.
function recent() {
  const [{step: first, start}] = moments;
  const worked = new Set(moments.flatMap(({work}) => work.map(([name]) => name)));
  const queue = new Set(waiting.slice(0, 40));
  const known = [...requests.values()].filter(
    ({name, reason}) => worked.has(name) || (!reason && queue.has(name)));
  const index = new Map(known.map(({name}, i) => [name, i]));
  const flat = work => work.filter(([name]) => index.has(name)).map(([name, ...n]) => [index.get(name), ...n]);
  const last = moments.at(-1).step - first;
  const passes = {
    step: moments.map(({step}) => step - first), start: moments.map(each => each.start - start),
    ms: moments.map(({ms}) => ms), work: moments.map(({work}) => flat(work).flat()),
    shape: moments.map(({work}) => [work.reduce((sum, [, , n]) => sum + n, 0)]),
    past: moments.map(() => 0),
    pad_slots: 0, finished_slots: 0, padded_keys: 0, finished: {}, columns: {},
    room: moments.map(({tables}) => known.map(({name}) => tables[name] ?? null)),
    cached: moments.map(({cached}) => cached)};
  for (const name of ["useful", "recomputed", "score_entries", "useful_scores", "copied_bytes"]) {
    passes[name] = moments.map(step => step[name]);
  }
  const list = known.map(({name, prompt, generated, arrival, arrived, reason, limit, steps, ms}) => ({
    name, prompt, generated: [...generated], limit, reason,
    arrival: Math.min(arrival - first, last), arrived: arrived - start,
    steps: steps.map(step => step - first), ms: ms.map(time => time - start)}));
  const {model, knobs, place, pool} = hello;
  return {name: model, idea: `The prefix stage as a server: the steps from ${first} on.`, knobs, place, pool, passes,
          base: first, slowed: moments.some(({slowed}) => slowed), requests: list,
          check: {summary: "outputs were not checked", wrong: null},
          xray: {left_out: "this run was watched while it served", wrong: 0, sentences: []}};
}

// --- drawing --------------------------------------------------------------------------------------

const PANELS = {timeline: "The last steps", plan: "Plan of the last step", tensor: "Its tensor",
                requests: "Requests", bill: "Bill of these steps", memory: "Memory",
                score: "These requests, so far, on every stage"};

function layOut() {
  view = {number: 0, panels: {}, rows: new Map(), rowOf: new Map()};
  $("views").replaceChildren(...Object.entries(PANELS).map(([name, title]) => element(
    "section", {className: "panel " + name, style: `--area: ${name}`, ariaLabel: title}, element("h2", {}, title),
    view.panels[name] = element("div"))));
  const legend = Object.entries(hello.names).filter(([kind]) => kind !== "pad" && kind !== "finished");
  $("legend").replaceChildren(...legend.map(
    ([kind, name]) => element("span", {}, element("i", {className: kind}), name)));
}

function draw() {
  drawing = false;
  for (const box of boxes) box.draw();
  if (!moments.length) {
    const there = running + waiting.length;
    const words = there
      ? `${number(running)} running, ${number(waiting.length)} waiting: they are drawn from their next step on`
        + `${paused ? ", when you go on" : ""}.`
      : "Nothing has run while this page was open. Send a prompt above, or see it work:";
    const dozen = there ? [] : [element("button", {id: "first", onclick: sendDozen}, "send a dozen prompts")];
    $("views").replaceChildren(div("empty", soft(words), ...dozen));
    return;
  }
  if (!view) layOut();
  const {step} = moments.at(-1), run = view.run = prepare(recent());
  view.now = momentOf(run, "step", run.steps.at(-1).step);
  view.states = run.requests.map(request => stateOf(run, request, view.now));
  // A request's row stays the same element, wherever it stands now.
  view.rows = new Map(run.requests.map(({name}, r) => [r, view.rowOf.get(name)]).filter(([, row]) => row));
  for (const panel of [drawTimeline, moveCursor, drawPlan, drawTensor, drawBill, drawRequests, drawMemory]) panel(view);
  if (simulate && performance.now() > scored + 2000) {
    view.panels.score.replaceChildren(scoreboard(wouldHave(run)), soft(
      `What each stage would take if they arrived at the same steps as here and found an empty cache; ${DATA.clock}.`));
    scored = performance.now();
  }
  view.rowOf = new Map([...view.rows].map(([r, row]) => [run.requests[r].name, row]));
  $("now").textContent = `step ${number(step)}: ${running} running, ${waiting.length} waiting`;
}

function drawSoon() {
  if (!drawing) requestAnimationFrame(draw);
  drawing = true;
}

// --- talking to the server ------------------------------------------------------------------------

const say = text => { $("said").textContent = text; };

async function send(path, body, tell = say) {   // the answer; null if it was refused
  const headers = {"Content-Type": "application/json"};
  if ($("key").value) headers.Authorization = `Bearer ${$("key").value}`;
  const init = body ? {method: "POST", headers, body: JSON.stringify(body)} : {headers};
  try {
    const answer = await fetch(path, init);
    if (answer.ok) {
      tell("");
      return answer;
    }
    $("unlock").hidden = answer.status !== 401;
    tell((await answer.json()).error.message.replaceAll("max_tokens", "tokens"));
  } catch {
    tell("The server does not answer.");
  }
  return null;
}

async function listen() {                // until the server closes the stream
  const answer = await send("/live/steps");
  if (!answer) return;
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const {value, done} = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n\n");
      rest = lines.pop();
      for (const line of lines) {        // others are comments, to keep the connection open
        if (line.startsWith("data: ")) hear(JSON.parse(line.slice("data: ".length)));
      }
    }
  } finally {
    reader.cancel();                     // else the connection stays, and a browser has only six
  }
}

function hear(message) {
  if (message.names) {                   // a stream begins: the server may be another one
    if (hello && hello.started !== message.started) for (const box of boxes) box.name = null;
    hello = message;
    [DATA.names, DATA.vocabulary] = [message.names, message.words];
    [moments, waiting, running, view] = [[], [], 0, null];
    Object.assign(DATA, {gpu: message.gpu, clock: message.clock});
    scored = -Infinity;
    document.documentElement.style.cssText += message.style;
    requests.clear();
    const {model, knobs, pool, place} = message;
    $("about").textContent = `${model}: at most ${knobs.max_batch} requests run, ${knobs.token_budget} tokens a step, `
      + `${plural(pool.pages, "page")} of ${knobs.page_size}; ${place}`;
  }
  if ("pace" in message) {
    ({pace, paused} = message);
    $("pause").ariaPressed = paused;
    $("pause").textContent = paused ? "go on" : "pause";
    $("speed").value = pace;
  }
  for (const note of message.notes ?? []) take(note);
  drawSoon();
}

async function connect() {
  for (;;) {
    try {
      await listen();
    } catch { /* the connection broke */ }
    $("about").textContent = "not connected; trying again …";
    await new Promise(resolve => setTimeout(resolve, 1000));
  }
}

// --- prompts --------------------------------------------------------------------------------------

// prompt: one text or several. The names of the new requests; null if there are none.
async function ask(prompt, tell, most = Infinity) {
  const [tokens, temperature] = [$("tokens"), $("temperature")];
  if (![tokens, temperature].every(input => input.reportValidity())) return null;
  const answer = await send("/live/ask", {
    prompt, max_tokens: Math.min(tokens.value, most), temperature: Number(temperature.value)}, tell);
  return answer && (await answer.json()).names;
}

let touched = false;                     // whether the speed is a person's choice

async function sendDozen() {             // slowly, if nobody else would have to wait
  if (!running && !waiting.length && !touched && !paused) await control({pace: 0.1});
  const line = `# ${1000 + Math.floor(9000 * Math.random())}\n`;   // or all is in the cache
  return ask(hello.dozen.prompt.map(prompt => line + prompt), say, hello.dozen.most);
}

const ENDS = {stop: "done: the model ended it", length: "done: it has as many tokens as were asked for",
              cancelled: "ended with its page"};

function addBox() {
  const prompt = element("textarea", {
    rows: 2, required: true, maxLength: 2 ** 17, ariaLabel: "prompt",
    placeholder: "A prompt, such as: # list.append\nEnter sends it; Shift and Enter begin a line."});
  const go = element("button", {}, "send");
  const remove = element("button", {ariaLabel: "remove this box", title: "remove this box"}, "×");
  const who = element("span", {className: "soft"}), output = element("output");
  const wrong = element("p", {className: "bad", role: "alert"});
  const tell = text => { wrong.textContent = text; };
  const node = element("div", {className: "box prompt"},
                       prompt, wrong, element("div", {}, go, remove, who), output);
  prompt.oninput = () => tell("");
  const box = {name: null, prompt, tell, take(name) {
    [box.name, box.asked, prompt.value, who.textContent] = [name, prompt.value, "", name];
    drawSoon();
  }, draw() {
    const request = requests.get(box.name);
    if (!request) return;
    const row = waiting.indexOf(box.name);
    const {reason, generated} = request;
    const now = reason ? ENDS[reason] ?? reason : row >= 0 ? `waiting, number ${row + 1}` : "running";
    who.textContent = `${box.name}: ${now}`;
    const end = output.scrollHeight - output.scrollTop < output.clientHeight + 30;
    output.replaceChildren(soft(box.asked), textOf(reason === "stop" ? generated.slice(0, -1) : generated));
    if (end) output.scrollTop = output.scrollHeight;
  }};
  go.onclick = () => {
    tell("");
    if (prompt.reportValidity()) sendBoxes([box]);
  };
  remove.onclick = () => {
    boxes = boxes.filter(other => other !== box);
    node.remove();
    count();
  };
  prompt.onkeydown = event => {
    if (event.key !== "Enter" || event.shiftKey) return;
    event.preventDefault();
    go.click();
  };
  boxes.push(box);
  $("boxes").append(node);
  count();
}

function count() {                       // of the boxes; the last one stays
  $("together").hidden = boxes.length < 2;
  $("boxes").classList.toggle("single", boxes.length < 2);
}

async function sendBoxes(chosen) {       // they arrive in the same step
  const prompts = chosen.map(({prompt}) => prompt.value);
  const names = await ask(prompts, chosen.length > 1 ? say : chosen[0].tell);
  names?.forEach((name, i) => chosen[i].take(name));
}

const control = body => send("/live/control", body);
$("pause").onclick = () => control({paused: !paused});
$("one").onclick = () => control({paused: true, step: true});
$("speed").onchange = () => {
  touched = true;
  control({pace: Number($("speed").value)});
};
$("dozen").onclick = sendDozen;
$("box").onclick = addBox;
$("together").onclick = () => {
  const filled = boxes.filter(({prompt}) => prompt.value);
  if (filled.length) sendBoxes(filled);
};
$("theme").onclick = () => {
  const {style} = document.documentElement, dark = matchMedia("(prefers-color-scheme: dark)").matches;
  style.colorScheme = (style.colorScheme || (dark ? "dark" : "light")) === "dark" ? "light" : "dark";
  drawSoon();
};
$("unlock").onsubmit = event => {
  event.preventDefault();
  $("unlock").hidden = true;
};
addBox();
addEventListener("resize", drawSoon);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawSoon);
connect();
