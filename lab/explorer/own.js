// The visitor's own requests: what stands in the address, the controls, and the stages' runs of
// them, which schedule.js computes anew after each change. The one state is `state.own`:
//
//     {requests: [[prompt, answer, arrival in ms, 1 if it begins like the others], ...], title,
//      knobs}
//
// In an address, "24-40_180-12-50" are two requests; what is 0 at the end, or default, is left out.

// [[from, to, by], ...] as one list of numbers.
function spaced(...ranges) {
  return ranges.flatMap(([from, to, by]) => {
    const length = (to - from) / by + 1;
    return Array.from({length}, (_, i) => from + i * by);
  });
}

const LENGTHS = spaced([1, 32, 1], [36, 128, 4], [144, 512, 16], [576, 2048, 64]);
const KNOBS = {   // theirName: vLLM's
  max_batch: {
    title: "max_batch", values: spaced([1, 16, 1], [20, 40, 4]), usual: 8,
    meaning: "requests that run at once", theirName: "max_num_seqs"},
  token_budget: {
    title: "token budget", values: [8, 16, 32, 64, 128, 256, 512, 1024, 2048], usual: 64,
    meaning: "tokens in a step, for the stages from chunked on",
    theirName: "max_num_batched_tokens"},
  memory: {
    title: "memory", values: spaced([32, 512, 32], [640, 2048, 128], [2560, 16384, 512]),
    usual: 2048, meaning: "tokens whose keys and values fit, for the stages from chunked on",
    theirName: "num_gpu_blocks × block_size"},
  page_size: {
    title: "page size", values: [1, 2, 4, 8, 16, 32, 64], usual: 16,
    meaning: "tokens in a page of paged and prefix", theirName: "block_size"},
  max_new_tokens: {
    title: "max_new_tokens", values: [0, ...LENGTHS], usual: 0,
    meaning: "the limit that each request declares for its answer, or the answer's length if "
      + "that is longer; chunked, interleaved and ragged reserve as much",
    theirName: "max_tokens"},
  common: {
    title: "common beginning", values: [0, ...LENGTHS], usual: 0,
    meaning: "tokens with which prompts marked ≡ begin", theirName: ""}};
const TITLE = 80;                        // letters
const PRESETS = {   // name: [an address, what to look at, in figures of the scoreboard]
  "mixed": [
    "own=24-40_60-24_12-60_120-30-40_36-16-80_200-24-120_16-48-160_48-32-200&run=naive",
    ({naive, ragged}) => `Prompts and answers of all lengths. In naive ${share(naive)} of the slots `
      + "are useful: the others are pads (grey) and finished rows (red). In ragged "
      + `${share(ragged)} are.`],
  "a long prompt": [
    "own=16-60_24-60_20-60_32-60_1024-20-100_20-30-150&token_budget=128&memory=8192"
      + "&run=dynamic&beside=ragged",
    ({dynamic, chunked, ragged}) => "E has 1,024 tokens. In dynamic nobody gets a token for "
      + `${ms(dynamic.next)} (red frames), in chunked for ${ms(chunked.next)}, in ragged for `
      + `${ms(ragged.next)}: “worst gap” in the scoreboard.`],
  "one system prompt": [
    "own=220-30-0-1_232-24-0-1_212-36-40-1_240-20-80-1_224-28-120-1_60-30-160&common=192"
      + "&memory=1024&run=prefix&beside=paged",
    ({paged, prefix}) => "Five prompts begin with the same 192 tokens (≡). Prefix computes them "
      + `once: a first token comes after ${ms(prefix.first)} at most, in paged after `
      + `${ms(paged.first)}; and it runs ${prefix.at_once} requests at once, not ${paged.at_once}.`],
  "little memory": [
    "own=40-30_60-40_52-36_44-50_60-24_48-44_56-30_40-36&memory=512&max_new_tokens=128&run=paged"
      + "&beside=ragged",
    ({paged, ragged}) => `Memory for 512 tokens, and ragged reserves 128 for each answer: `
      + `${ragged.at_once} requests at once, ${rounded(ragged.speed)} tokens/s. Paged gives pages `
      + `as answers grow: ${paged.at_once} at once, ${rounded(paged.speed)} tokens/s.`]};
const share = ({useful}) => `${Math.round(100 * useful)}%`;
const MOST = 40;                         // requests
const OF_A_FILE = "This page is a file on your computer, so only what follows its address is "
  + "copied. Others put it behind the address of their copy, or into its “paste requests”: ";
const HEAVY = 5000;                      // tokens of answers, from which on computing is announced

// --- the state -----------------------------------------------------------------------------------

const planned = new Map();               // stage -> its run of state.own
const rows = [];                         // controls of each request
const knobs = {};                        // and of each knob
let lastOwn = PRESETS.mixed[0];          // the address of the requests that were shown last
let soon = null;                         // the next frame, if it shall redraw
let computing = null;                    // a timer: the next stage of the scoreboard

const LIMITS = [   // of what an address or a line gives for a request: what it is, least, most
  ["a prompt's tokens", 1, 8192], ["an answer's tokens", 1, 2048], ["an arrival in ms", 0, 1e5]];
const isWhole = (n, least, most) => Number.isInteger(n) && n >= least && n <= most;

function setOwn(own) {
  state.own = own;
  forget();
}

function forget() {                      // what was computed of other requests
  planned.clear();
  clearTimeout(computing);
}

// How many tokens all answers have: what computing them takes.
const answers = () => sumOf(state.own.requests.map(([, answer]) => answer));

// The requests of an address; null if it has none; one, if none is right. lost: what cannot be read
// is added to it.
function ownFrom(parts, lost) {
  if (!parts.has("own")) return null;
  const requests = requestsFrom(parts.get("own"), lost);
  const title = (parts.get("title") ?? "").slice(0, TITLE);
  const others = ["own", "title", "run", "beside", "ms", "step", "theme"];
  const known = [...others, ...Object.keys(KNOBS)];
  lost.push(...[...parts.keys()].filter(name => !known.includes(name)));
  return {requests: requests.length ? requests : [[24, 40, 0, 0]], title,
          ...knobsFrom(parts, lost)};
}

function requestsFrom(text, lost) {
  const right = [], wrong = [];
  for (const [r, words] of text.split("_").entries()) {
    const [prompt, answer, arrival = 0, shares = 0] = words.split("-").map(Number);
    const isRight = r < MOST && isWithinLimits([prompt, answer, arrival]);
    if (isRight) right.push([prompt, answer, arrival, shares ? 1 : 0]);
    else wrong.push(`“${words}”`);
  }
  if (wrong.length) {
    lost.push(`${plural(wrong.length, "request")} (${wrong.slice(0, 3).join(", ")})`);
  }
  return right;
}

function isWithinLimits(request) {
  return LIMITS.every(([, least, most], i) => isWhole(request[i], least, most));
}

function knobsFrom(parts, lost) {
  const settings = {};
  for (const [name, {title, values, usual}] of Object.entries(KNOBS)) {
    const value = Number(parts.get(name) ?? usual);
    const isRight = isWhole(value, values[0], values.at(-1));
    settings[name] = isRight ? value : usual;
    if (!isRight) lost.push(`${title}=${parts.get(name)} (now ${usual})`);
  }
  return settings;
}

function ownParts({requests, title, ...settings}) {   // for an address
  const list = requests.map(request => request.join("-").replace(/(-0)+$/, ""));
  const parts = title ? {title} : {};
  parts.own = list.join("_");
  for (const [name, value] of Object.entries(settings)) {
    if (value !== KNOBS[name].usual) parts[name] = value;
  }
  return parts;
}

// The address of a recorded run's lengths; they arrive when they did on the GPU's clock.
function ownOf(run, beside) {
  const {max_batch = 8, token_budget = 64, page_size = 16} = run.knobs, {requests} = run;
  const timed = computed("ragged", lengthsOf(requests), {max_batch, token_budget});
  const shared = requests.map(request => sharedWithOthers(request, requests));
  const common = largest(shared) > page_size ? largest(shared) : 0;
  const memory = limitOf(run.knobs) ?? enoughMemory(requests, max_batch, page_size);
  const list = requests.map(({prompt, generated}, r) => {
    const shares = common && shared[r] === common ? 1 : 0;
    return [prompt.length, generated.length, Math.round(timed.requests[r].arrived), shares];
  });
  const parts = ownParts({
    requests: list.slice(0, MOST), max_batch, token_budget, page_size, common,
    memory: Math.min(memory, KNOBS.memory.values.at(-1))});
  const stages = {run: run.stage, beside: RUNS.get(beside)?.stage};
  for (const [name, stage] of Object.entries(stages)) {
    if (STAGE_KNOBS[stage]) parts[name] = stage;
  }
  return String(new URLSearchParams(parts));
}

function sharedWithOthers({prompt}, requests) {   // the longest beginning
  const others = requests.filter(other => other.prompt !== prompt);
  return largest(others.map(other => alike(prompt, other.prompt)));
}

function enoughMemory(requests, max_batch, page_size) {   // for whatever runs at once
  const rooms = requests.map(({prompt, limit}) => {
    const pages = Math.ceil((prompt.length + limit - 1) / page_size);
    return page_size * pages;
  });
  rooms.sort((a, b) => b - a);
  return Math.max(KNOBS.memory.usual, sumOf(rooms.slice(0, max_batch)));
}

function ownRun(stage) {
  if (!planned.has(stage)) {
    const {title, requests, common, memory, max_new_tokens, ...limits} = state.own;
    const pages = Math.floor(memory / limits.page_size);
    planned.set(stage, computed(
      stage, ownLoad(), {...limits, in_ms: true, max_kv_tokens: memory, pages}));
  }
  return planned.get(stage);
}

function ownLoad() {                     // as schedule.js takes it
  const {requests, common, max_new_tokens} = state.own;
  return requests.map(([prompt, answer, arrival, shares], r) => {
    const equal = requests.slice(0, r).map(([otherPrompt, , , otherShares]) => {
      return shares && otherShares ? Math.min(common, prompt, otherPrompt) : 0;
    });
    return {prompt, answer, arrival, limit: Math.max(answer, max_new_tokens), equal};
  });
}

// --- changes -------------------------------------------------------------------------------------

function edit(change) {
  note("");
  change(state.own);
  soon ??= requestAnimationFrame(redraw);
}

function redraw() {                      // at most once in a frame
  soon = null;
  if (!state.own) return;
  forget();
  if (answers() <= HEAVY) return redrawNow();
  // Many tokens take a while: first the page says so, and computes when the bar is let go.
  note(`Computing ${plural(state.own.requests.length, "request")} with `
       + `${plural(answers(), "token")} of answers …`, "soft");
  computing = setTimeout(() => {
    redrawNow();
    note("");
  }, 250);
}

function redrawNow() {
  setTicks(state.value);
  fill();
}

// undefined: not computed yet
function scoreOf(stage) {
  if (!planned.has(stage) && answers() > HEAVY) return undefined;
  return figuresOf(ownRun(stage));
}

// The figures that are there. Of many tokens the others follow, a stage at a time.
function scoresSoFar() {
  const scores = {};
  for (const stage of Object.keys(STAGE_KNOBS)) scores[stage] = scoreOf(stage);
  const missing = Object.keys(scores).find(stage => scores[stage] === undefined);
  clearTimeout(computing);
  if (missing) {
    computing = setTimeout(() => {
      if (!state.own) return;
      ownRun(missing);
      drawScores();
    }, 30);
  }
  return scores;
}

// --- controls ------------------------------------------------------------------------------------

// A native range input, whose positions are indices of a table of values and whose face is a bar;
// and a native number, which takes what lies between them. set(value): changes the state
function bar(name, kind, values, set, most = values.at(-1)) {
  const least = values[0];
  let shown = null;                      // the value
  const input = element("input", {type: "range", min: 0, max: values.length - 1, ariaLabel: name});
  input.oninput = () => edit(() => set(values[input.value]));
  const exact = element("input", {
    type: "number", min: least, max: most, required: true, ariaLabel: `${name}, as a number`});
  exact.oninput = () => exact.checkValidity() && edit(() => set(Number(exact.value)));
  exact.onchange = () => {               // a value that is refused does not stay in its field
    if (exact.checkValidity()) return;
    const refused = exact.value || "nothing";
    exact.value = shown;
    note(`${name}: a whole number from ${number(least)} to ${number(most)}, please, not `
         + `${refused}. It stays ${number(shown)}.`);
  };

  function show(value) {
    shown = value;
    input.value = Math.max(0, atMost(values, value) - 1);
    input.ariaValueText = number(value);
    input.style.setProperty("--share", input.value / (values.length - 1));
    if (document.activeElement !== exact) exact.value = value;
  }

  return {node: element("label", {className: "length " + kind}, input, exact), show};
}

function row(r) {                        // a request's controls; r: its number
  const name = nameOf(r), set = (i, value) => { state.own.requests[r][i] = value; };
  const [[, , longestPrompt]] = LIMITS;
  const prompt = bar(`${name}: prompt`, "prefill", LENGTHS, n => set(0, n), longestPrompt);
  const answer = bar(`${name}: answer`, "decode", LENGTHS, n => set(1, n));
  const arrival = arrivalBar(name, time => set(2, time));
  const shares = shareButton(r, name), remove = removeButton(r, name);
  prompt.node.prepend(element("small", {ariaHidden: "true"}, "prompt"));   // on a phone
  answer.node.prepend(element("small", {ariaHidden: "true"}, "answer"));
  const node = element("div", {className: "row", ariaLabel: `request ${name}`}, bold(name),
                       prompt.node, answer.node, shares, remove, arrival.node);
  node.setAttribute("role", "group");

  function show([promptTokens, answerTokens, arrivalMs, isShared], end) {
    prompt.show(promptTokens);
    answer.show(answerTokens);
    arrival.show(arrivalMs, end);
    shares.ariaPressed = String(Boolean(isShared));
    remove.disabled = state.own.requests.length === 1;
  }

  return {node, show};
}

function shareButton(r, name) {
  const words = element("small", {ariaHidden: "true"}, "alike");
  const onclick = () => edit(own => {
    const request = own.requests[r];
    request[3] = request[3] ? 0 : 1;
    own.common ||= 64;
  });
  return element("button", {title: "begins with the common beginning",
                            ariaLabel: `${name}: begins like the others`, onclick}, "≡", words);
}

function removeButton(r, name) {
  const words = element("small", {ariaHidden: "true"}, "remove"), label = `remove ${name}`;
  const onclick = () => {
    edit(own => own.requests.splice(r, 1));
    const wasLast = !state.own.requests[r];   // the focus goes to the one before
    if (wasLast) $("rows").querySelectorAll(".out")[r - 1].focus();
  };
  return element("button", {className: "out", ariaLabel: label, title: label, onclick},
                 "×", words);
}

function arrivalBar(name, set) {         // as long as the timeline
  const input = element("input", {type: "range", min: 0, ariaLabel: `${name}: arrival, ms`});
  const output = element("output");
  input.oninput = () => {
    state.held ??= views[0].end;         // while it is dragged, the axis stays
    edit(() => set(Number(input.value)));
  };
  input.onchange = () => edit(() => { state.held = null; });

  function show(arrival, end) {
    input.max = Math.max(end, arrival);
    input.value = arrival;
    output.textContent = `${number(arrival)} ms`;
    input.ariaValueText = output.textContent;
    input.disabled = state.clock === "step";
  }

  return {node: element("label", {className: "arrival"}, input, output), show};
}

function beginOwn() {
  const presets = Object.entries(PRESETS).map(
    ([name, [address]]) => element("button", {onclick: () => navigate(address)}, name));
  const title = element("input", {
    id: "title", maxLength: TITLE, placeholder: "title of the link", ariaLabel: "title of the link",
    oninput: () => edit(own => { own.title = title.value; })});
  const copy = element("button", {id: "copy", onclick: () => copyLink(copy)}, "copy link");
  $("presets").append("Begin with:", ...presets, title, copy);
  $("pasting").append(pasteBox());
  for (const [name, {title: words, values, meaning, theirName}] of Object.entries(KNOBS)) {
    const knob = bar(`${words}: ${meaning}`, "knob", values, n => { state.own[name] = n; });
    knob.node.prepend(
      element("span", {title: meaning}, words, element("small", {}, theirName)));
    knobs[name] = knob;
    $("knobs").append(knob.node);
  }
  $("more").onclick = () => edit(({requests}) => requests.push([...requests.at(-1)]));
}

function pasteBox() {
  const examples = [
    "500 60", "40, 120, 25", '{"prompt": 300, "answer": 80, "arrival": 25, "shared": true}'];
  const box = element(
    "textarea", {rows: 4, ariaLabel: "requests", placeholder: examples.join("\n")});
  const message = element("span", {className: "soft", role: "status"});
  const use = element(
    "button", {onclick: () => { message.textContent = usePasted(box.value); }}, "use these");
  return element(
    "details", {className: "paste"}, element("summary", {}, "paste requests"),
    soft("A line for each request: the lengths of its prompt and its answer, in tokens, and, if "
         + "not 0, its arrival in ms and whether it begins like the others (1). Or JSON. Or a "
         + "link, or the part of one from # on."), box, use, message);
}

// Shows pasted requests, or a pasted link. Returns what is to be said of them.
function usePasted(text) {
  const [, link] = /^[^\s#]*#(\S+)$/.exec(text.trim()) ?? [];
  if (link) {
    navigate(link);
    return "";
  }
  let requests;
  try {
    requests = parsed(text);
  } catch (error) {
    return error.message;
  }
  edit(own => {
    own.requests = requests;
    if (requests.some(([, , , shares]) => shares)) own.common ||= 64;
  });
  return `${plural(requests.length, "request")}.`;
}

// Where this page is published: pages.yml fills it in, so a copy on a computer knows it.
const published = () => document.querySelector("meta[name=published]").content;

async function copyLink(button) {
  const isFile = location.protocol === "file:";
  const page = isFile ? published() : location.href.split("#")[0];
  const link = page + address();
  await navigator.clipboard?.writeText(link).catch(() => {});
  if (isFile) note(page ? link : OF_A_FILE + link, "soft");
  button.textContent = "copied";
  setTimeout(() => { button.textContent = "copy link"; }, 1500);
}

// --- pasted requests -----------------------------------------------------------------------------

// Requests in lines. Error with a line that says what is wrong.
function parsed(text) {
  const numbered = text.split("\n").map((line, i) => ({line: line.trim(), where: `line ${i + 1}`}));
  const filled = numbered.filter(({line}) => line);
  const hasHead = filled.length && isHead(filled[0].line);
  const lines = hasHead ? filled.slice(1) : filled;
  if (!lines.length || lines.length > MOST) {
    throw Error(`1 to ${MOST} requests, please; there are ${lines.length} lines`);
  }
  return lines.map(({line, where}) => {
    const request = line.startsWith("{") ? fromJSON(line, where) : fromWords(line, where);
    refuseBeyondLimits(request, where);
    const [prompt, answer, arrival, shared] = request;
    return [prompt, answer, arrival, shared ? 1 : 0];
  });
}

function refuseBeyondLimits(request, where) {
  for (const [i, [what, least, most]] of LIMITS.entries()) {
    if (isWhole(request[i], least, most)) continue;
    throw Error(`${where}: ${what} must be a whole number from ${least} to ${number(most)}, `
                + `not ${request[i]}`);
  }
}

// The fields of a line, without the quotation marks around them.
const fields = line => line.split(/[\s,;]+/).map(field => field.replace(/^["']|["']$/g, ""));
const isNumber = field => field !== "" && Number.isFinite(Number(field));

function isHead(line) {                  // of a table: names, and no number
  if (line.startsWith("{")) return false;
  return fields(line).length > 1 && !fields(line).some(isNumber);
}

function fromWords(line, where) {        // prompt, answer, arrival, whether it begins like others
  const words = fields(line).filter(field => field !== "");
  const odd = words.find(word => !isNumber(word));
  if (odd !== undefined) throw Error(`${where}: “${odd}” is no number`);
  if (words.length < 2 || words.length > 4) {
    throw Error(`${where}: two to four numbers, not “${line}”`);
  }
  const [prompt, answer, arrival = 0, shared = 0] = words.map(Number);
  return [prompt, answer, arrival, shared];
}

const NAMES = ["prompt", "answer", "arrival", "shared"];

function fromJSON(line, where) {
  let request;
  try {
    request = JSON.parse(line);
  } catch {
    throw Error(`${where} is not JSON`);
  }
  const unknown = Object.keys(request).find(name => !NAMES.includes(name));
  if (unknown !== undefined) {
    throw Error(`${where}: “${unknown}” is unknown; there are ${NAMES.join(", ")}`);
  }
  for (const name of ["prompt", "answer"]) {
    if (!(name in request)) throw Error(`${where}: “${name}” is missing`);
  }
  const {prompt, answer, arrival = 0, shared = 0} = request;
  return [numberOf(prompt), numberOf(answer), numberOf(arrival), Number(shared)];
}

// A number, also one in quotation marks; anything else stays, and is named in the error.
function numberOf(value) {
  return typeof value === "string" && isNumber(value) ? Number(value) : value;
}

// --- drawing -------------------------------------------------------------------------------------

// Of the row of a timeline, in pixels. In the first, a row is as high as the controls beside it.
function ownRowHeight(viewNumber) {
  const rows = state.own.requests.length;
  if (innerWidth <= 760) return Math.max(4, Math.min(14, Math.floor(130 / rows)));
  if (viewNumber) return 11;
  return isLow() ? 22 : 24;              // as .row in page.css
}

function drawOwn({wide}) {               // the controls show the state
  const {requests} = state.own;
  while (rows.length < requests.length) rows.push(row(rows.length));
  const nodes = $("rows").children;      // the others stay where they are: one may have the focus
  while (nodes.length > requests.length) nodes[nodes.length - 1].remove();
  while (nodes.length < requests.length) $("rows").append(rows[nodes.length].node);
  $("own").style.setProperty("--wide", wide - 2 + "px");
  const end = state.held ?? largest(shown().map(endOf));
  requests.forEach((request, r) => rows[r].show(request, end));
  for (const name of Object.keys(KNOBS)) knobs[name].show(state.own[name]);
  $("more").disabled = requests.length === MOST;
  if (document.activeElement !== $("title")) $("title").value = state.own.title ?? "";
}

function ownScores() {                   // {stage: its figures}, of all
  const scores = {};
  for (const stage of Object.keys(STAGE_KNOBS)) scores[stage] = figuresOf(ownRun(stage));
  return scores;
}

function pickOwn(run) {                  // the run that is beside it changes places with it
  change(run === state.beside ? {run, beside: state.run} : {run});
}

function ownScoreboard(scores) {
  const marks = {[state.beside]: "beside it", [state.run]: "shown"};
  return scoreboard(scores, run => {
    pickOwn(run);
    $("views").querySelector(".scores [aria-pressed=true]").focus();   // as it was
  }, marks);
}

// Its most asked figures, beside the timelines: in sight while a bar is moved.
const FEW = ["speed", "first", "next"];

function fewScores(scores) {
  const heads = FEW.map(figure => {
    const [title, , meaning] = SCORES[figure];
    return element("th", {scope: "col", title: meaning}, title.replace(", ms", ""));
  });
  const head = element("tr", {}, element("th", {scope: "col"}, "stage"), ...heads);
  const lines = Object.entries(scores).map(([name, score], i) => {
    const cells = FEW.map(figure => element("td", {}, fewWords(score, figure)));
    return element("tr", {}, element("th", {scope: "row"}, stageButton(name, i)), ...cells);
  });
  return element("table", {}, head, ...lines);
}

function fewWords(score, figure) {
  if (score === undefined) return "…";
  const [, text] = SCORES[figure];
  return score ? text(score[figure]) : "–";
}

function stageButton(name, i) {          // i: its line
  const isShown = name === state.run || name === state.beside;
  return element("button", {ariaPressed: String(isShown), onclick: () => {
    pickOwn(name);
    $("few").querySelectorAll("button")[i].focus();   // as it was: the table is a new one
  }}, name);
}

function drawScores() {
  const scores = scoresSoFar(), {score} = views[0].panels;
  score?.replaceChildren(ownScoreboard(scores));
  $("few").replaceChildren(fewScores(scores));
  $("looks").textContent = lookAt(scores);
}

function lookAt(scores) {                // of the preset whose requests these are
  const isReady = Object.values(scores).every(Boolean);
  const here = JSON.stringify(ownParts(state.own));
  for (const [address, words] of Object.values(PRESETS)) {
    const preset = ownFrom(new URLSearchParams(address), []);
    if (isReady && JSON.stringify(ownParts(preset)) === here) return words(scores);
  }
  return "";
}

// --- a line of words: the plan, and what waits for what ------------------------------------------

function sayOwn(view) {
  const {run, now, number: viewNumber} = view;
  const runsNone = run.requests.every(({refused}) => refused);
  const plan = runsNone ? "nothing runs." : planWords(view, partsNow(view));
  const who = state.beside ? `${run.name}, step` : "Step";
  const text = `${who} ${now.step}: ${plan}${queueWords(view)}${refusedWords(run)}`;
  const node = viewNumber ? $("other").firstElementChild : $("said");
  if (node.textContent !== text) node.textContent = text;   // else a reader would say it again
}

function queueWords({run, now, states}) {
  const all = run.requests.map((request, r) => ({...request, kind: states[r].kind}));
  const queue = all.filter(({kind}) => kind === "waiting" || kind === "preempted");
  if (!queue.length || !now.passes.length) return "";
  queue.sort((a, b) => a.arrived - b.arrived);
  const names = queue.map(({name, kind}) => kind === "preempted" ? `${name} (preempted)` : name);
  if (names.length > 8) names.splice(8, Infinity, `and ${names.length - 8} more`);
  const verb = names.length > 1 ? "wait" : "waits";
  return ` ${names.join(" ")} ${verb} for ${reasonToWait(run, now, queue[0])}.`;
}

function refusedWords({requests}) {
  const [first, ...others] = requests.filter(({refused}) => refused);
  if (!first) return "";
  const names = others.map(({name}) => name).join(" ");
  return ` ${first.name} can never run: ${first.refused}${names ? `; nor can ${names}` : ""}.`;
}

// For a stage that cannot limit its memory, fewer may run at once than max_batch says.
const PLACES = {unbatched: "a turn", naive: "the batch", dynamic: "a place"};

function reasonToWait(run, now, first) { // first: in the queue
  const {knobs, passes} = run, [pass] = now.passes;
  if (PLACES[run.name]) {
    const isFewer = knobs.max_batch < state.own.max_batch;
    const why = `: more than ${knobs.max_batch} at once might not fit into the memory`;
    return PLACES[run.name] + (isFewer ? why : "");
  }
  if (preempts(run, now)) return "the next step: none is admitted in a step that preempts";
  if (passes.at_once[pass] === knobs.max_batch) return "a place";
  if (tokensIn(run, now) === knobs.token_budget) return "the token budget";
  return memoryReason(run, now, first);
}

function memoryReason({name: stage, knobs, passes, pool}, now, {name, prompt, limit, steps}) {
  const reserved = passes.reserved[now.passes[0]];
  if (!pool) {
    const room = plural(prompt.length + limit - 1, "token");
    return `memory: ${name} would reserve ${room} (the last one of its answer needs none), `
      + `${number(knobs.max_kv_tokens - reserved)} free`;
  }
  const tokens = prompt.length + atMost(steps, now.step);   // it may have been preempted
  const pages = plural(Math.ceil(tokens / pool.page_size), "page");
  const needs = stage === "prefix" ? "needs at most" : "needs";   // some may be cached
  return `memory: ${name} ${needs} ${pages}, `
    + `${number(pool.pages - reserved / pool.page_size)} free`;
}

function preempts({passes, requests}, {step, passes: [pass]}) {
  const freed = Object.entries(passes.room[pass]).filter(([, room]) => room === null);
  return freed.some(([r]) => {           // a request that is done frees its memory, too
    const {steps, generated} = requests[r];
    return atMost(steps, step - 1) < generated.length;
  });
}
