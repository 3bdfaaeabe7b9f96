// The twin: what the eight stages do with a load, computed once more in a browser. Which tokens
// are in which pass depends on lengths alone, so there is no model here, and no token:
//
//     simulate("paged", [{prompt: 20, answer: 5}, {prompt: 9, answer: 3, arrival: 2}],
//              {max_batch: 8, token_budget: 32, pages: 26, page_size: 16}, gpu)
//
// A stage is a generator that yields a batch where the Python file makes a forward pass. Names and
// order are those of the Python files, which say why; tests/test_twin.py compares every pass of
// random loads. Out of scope: the policies of beyond/fairness.py, ragged's "mask", prepacking.

const sum = values => values.reduce((a, b) => a + b, 0);
const largest = values => values.reduce((a, b) => Math.max(a, b), 0);

// --- request.py ----------------------------------------------------------------------------------

class Request {
  // prompt, answer: numbers of tokens; limit: of the longest answer that it may get
  // equal: for each request before it, with how many of that one's tokens it begins
  // refused: why it can never run; "": it can
  constructor({prompt, answer, limit = answer, arrival = 0, equal = [], refused = ""}, number) {
    Object.assign(this, {number, prompt, answer, limit, arrival, equal, refused});
    this.computed = 0;                   // tokens whose keys and values are in the cache
    this.generated = 0;
    this.block_table = null;
    this.page_hashes = [];
    this.token_steps = [];
    this.token_times = [];
    // for the record: tokens that were computed at least once; what it held in the last pass
    this.reached = 0;
    this.room = null;
    this.room_pages = undefined;
  }
  get todo() { return this.prompt + this.generated - this.computed; }
  get kv_capacity() { return this.prompt + this.limit - 1; }
  get finished() { return this.generated === this.answer; }
}

function requests_due(plan) {
  return plan.filter(([request, n]) => n === request.todo).map(([request]) => request);
}

function advance(plan) {
  const due = requests_due(plan);
  for (const [request, n] of plan) request.computed += n;
  for (const request of due) request.generated += 1;
}

class Clock {   // arrivals are steps, or with `in_ms` milliseconds of this clock
  constructor(in_ms) { Object.assign(this, {in_ms, now: 0}); }
  arrived(request, step) { return request.arrival <= (this.in_ms ? this.now : step); }
  next_step(step, request) {             // nothing is left to do before it arrives
    if (!this.in_ms) return Math.max(step, request.arrival);
    this.now = Math.max(this.now, request.arrival);
    return step;
  }
}

// --- scheduler.py --------------------------------------------------------------------------------

class Scheduler {
  constructor(requests, {max_batch, token_budget, max_kv_tokens}, clock) {
    Object.assign(this, {max_batch, token_budget, clock});
    this.max_kv_tokens = max_kv_tokens ?? Infinity;
    this.waiting = [];
    this.running = [];
    for (const request of requests) this.add(request);
  }
  add(request) {                         // Python refuses the whole run
    if (request.kv_capacity <= this.max_kv_tokens) this.waiting.push(request);
    else request.refused = `${request.kv_capacity} KV tokens, there are ${this.max_kv_tokens}`;
  }
  schedule(step) {
    const plan = [], ran = this.running.length;
    let budget = this.token_budget;
    for (const request of this.running) {   // `make_room` may take others from the list's end
      const n = Math.min(request.todo, budget);
      if (!n || !this.make_room(request, n)) continue;
      plan.push([request, n]);
      budget -= n;
    }
    const preempted = this.running.length < ran;
    while (budget && !preempted && this.running.length < this.max_batch) {
      if (!this.arrived(step) || !this.admit(this.waiting[0])) break;
      const request = this.waiting.shift();
      this.running.push(request);
      const n = Math.min(request.todo, budget);
      this.make_room(request, n);
      plan.push([request, n]);
      budget -= n;
    }
    if (!plan.length) throw Error(`step ${step}: nothing can go on`);
    return plan;
  }
  update(plan) {
    advance(plan);
    for (const request of this.running.filter(request => request.finished)) this.free(request);
    this.running = this.running.filter(request => !request.finished);
  }
  get busy() { return this.waiting.length + this.running.length > 0; }
  next_step(step) {
    return this.running.length ? step : this.clock.next_step(step, this.waiting[0]);
  }
  arrived(step) { return this.waiting.length > 0 && this.clock.arrived(this.waiting[0], step); }
  admit(request) {
    const reserved = sum(this.running.map(other => other.kv_capacity));
    return reserved + request.kv_capacity <= this.max_kv_tokens;
  }
  make_room() { return true; }
  free() {}
}

// --- paging.py, generate_paged.py ----------------------------------------------------------------

class PagePool {
  constructor(number, page_size) {
    this.number = number;
    this.page_size = page_size;
    this.free_queue = Array.from(Array(number).keys());
  }
  get free_pages() { return this.free_queue.length; }
  get cached_and_free() { return []; }
  needed(tokens) { return Math.ceil(tokens / this.page_size); }
  allocate(table, number) { table.push(...this.free_queue.splice(0, number)); }
  free(table) { this.free_queue.push(...table); }
}

function pool_size(requests, {max_batch, page_size, pages = null}) {
  const needed = requests.map(({kv_capacity}) => Math.ceil(kv_capacity / page_size));
  if (pages !== null) return Math.min(pages, sum(needed));
  return sum(needed.sort((a, b) => b - a).slice(0, max_batch));
}

class PagedScheduler extends Scheduler {
  constructor(requests, knobs, clock) {
    const number = pool_size(requests, knobs);
    super(requests, {...knobs, max_kv_tokens: number * knobs.page_size}, clock);
    this.pool = new PagePool(number, knobs.page_size);
  }
  admit(request) {
    if (this.pool.needed(request.todo) > this.pool.free_pages) return false;
    request.block_table = [];
    return true;
  }
  make_room(request, n) {
    const more = this.pool.needed(request.computed + n) - request.block_table.length;
    while (more > this.pool.free_pages) {
      const victim = this.running.at(-1);
      this.preempt(victim);
      if (victim === request) return false;
    }
    this.pool.allocate(request.block_table, more);
    return true;
  }
  preempt(request) {
    this.running.pop();
    this.free(request);
    request.computed = 0;
    this.waiting.unshift(request);
  }
  free(request) {
    this.pool.free(request.block_table);
    request.block_table = null;
  }
}

// --- generate_prefix.py --------------------------------------------------------------------------

// What tells a page's tokens, and all before them, from others: who has them first, and their end.
function page_hash({number, equal}, end) {
  const first = equal.findIndex(tokens => tokens >= end);
  return `${first < 0 ? number : first} ${end}`;
}

// Python's free queue in two parts, so that nothing is moved: `blank`, its front, has the pages that
// nobody can find, the next to be taken last; `free_queue`, behind it, those that can be found.
class PrefixPool extends PagePool {
  constructor(number, page_size) {
    super(number, page_size);
    this.blank = this.free_queue.reverse();
    this.free_queue = new Set();
    this.ref_count = Array(number).fill(0);
    this.cached = new Map();             // hash -> the pages that have it
    this.hash_of = new Map();            // page -> its hash
  }
  get free_pages() { return this.blank.length + this.free_queue.size; }
  get cached_and_free() { return [...this.free_queue]; }
  find(hash) {                           // the oldest page that has it
    const [page] = this.cached.get(hash) ?? [];
    return page;
  }
  share(table, pages) {
    for (const page of pages) {
      this.free_queue.delete(page);
      this.ref_count[page] += 1;
      table.push(page);
    }
  }
  allocate(table, number) {
    for (let i = 0; i < number; i++) this.share(table, [this.blank.pop() ?? this.evict()]);
  }
  evict() {
    const [page] = this.free_queue;
    const hash = this.hash_of.get(page), pages = this.cached.get(hash);
    this.hash_of.delete(page);
    pages.delete(page);
    if (!pages.size) this.cached.delete(hash);
    return page;                         // `share` takes it out of the queue
  }
  free(table) {
    for (const page of [...table].reverse()) {
      this.ref_count[page] -= 1;
      if (this.ref_count[page]) continue;
      if (this.hash_of.has(page)) this.free_queue.add(page); else this.blank.push(page);
    }
  }
  register(page, hash) {
    this.hash_of.set(page, hash);
    if (!this.cached.has(hash)) this.cached.set(hash, new Set());
    this.cached.get(hash).add(page);
  }
}

class PrefixScheduler extends PagedScheduler {
  constructor(...load) {
    super(...load);
    this.pool = new PrefixPool(this.pool.number, this.pool.page_size);
  }
  hash_of_page(request, i) {
    const hashes = request.page_hashes;
    while (hashes.length <= i) {
      const end = (hashes.length + 1) * this.pool.page_size;
      hashes.push(page_hash(request, end));
    }
    return hashes[i];
  }
  admit(request) {
    const {pool} = this;
    const shared = this.cached_pages(request);
    const more = pool.needed(request.todo) - shared.length;
    const revived = shared.filter(page => pool.free_queue.has(page)).length;
    if (more + revived > pool.free_pages) return false;
    request.block_table = [];
    request.computed = shared.length * pool.page_size;
    pool.share(request.block_table, shared);
    return true;
  }
  cached_pages(request) {                // its first pages, up to the first that is not cached
    const full = Math.floor((request.todo - 1) / this.pool.page_size);
    const pages = [];
    for (let i = 0; i < full; i++) {
      const page = this.pool.find(this.hash_of_page(request, i));
      if (page === undefined) break;
      pages.push(page);
    }
    return pages;
  }
  make_room(request, n) {
    const granted = super.make_room(request, n);
    if (granted) this.cache_filled(request, request.computed, request.computed + n);
    return granted;
  }
  cache_filled(request, start, end) {
    const {page_size} = this.pool;
    const first = Math.floor(start / page_size), full = Math.floor(end / page_size);
    for (let i = first; i < full; i++) {
      this.pool.register(request.block_table[i], this.hash_of_page(request, i));
    }
  }
}

// --- layouts: the tensor's shape; the scores that attention computes, the keys that it reads, and
// --- those that it copies, of all rows. (A GPU reads pages through the table, and copies none.)

const n_of = ([, n]) => n;
const start_of = ([{computed}]) => computed;
const end_of = ([{computed}, n]) => computed + n;

function static_batch(plan, start, end) {
  const B = plan.length, T = end - start;
  return {shape: [B, T], scores: B * T * end, keys: B * end, copied: 0};
}

function rectangle(plan) {
  const B = plan.length;
  const T = largest(plan.map(n_of));
  const P = largest(plan.map(start_of));
  const past = B * P, keys = B * (P + T);
  return {shape: [B, T], scores: T * keys, keys, copied: past + keys};
}

function flat(plan) {
  const scores = plan.map(part => n_of(part) * end_of(part));
  return {
    shape: [sum(plan.map(n_of))],
    scores: sum(scores),
    keys: sum(plan.map(end_of)),
    copied: 0};
}

// One request: its cache is written in place.
const alone = plan => ({...rectangle(plan), copied: 0});

// --- generate_*.py -------------------------------------------------------------------------------

function* naive(waiting, {max_batch}, clock) {
  let step = 0;
  while (waiting.length) {
    step = clock.next_step(step, waiting[0]);
    const arrived = waiting.filter(request => clock.arrived(request, step));
    const running = arrived.slice(0, max_batch);
    waiting = waiting.slice(running.length);
    let start = 0, end = largest(running.map(({prompt}) => prompt));
    const capacity = end + largest(running.map(({limit}) => limit - 1));
    while (!running.every(({finished}) => finished)) {
      const plan = running.map(request => [request, request.finished ? 0 : request.todo]);
      yield {step, plan, running, columns: end, capacity, cost: static_batch(plan, start, end)};
      advance(plan);
      start = end;
      end += 1;
      step += 1;
    }
  }
}

function* dynamic(waiting, {max_batch}, clock, layout = rectangle) {
  let running = [];
  for (let step = 0; waiting.length || running.length; step++) {
    if (!running.length) step = clock.next_step(step, waiting[0]);
    const arrived = waiting.filter(request => clock.arrived(request, step));
    const admitted = arrived.slice(0, max_batch - running.length);
    waiting = waiting.slice(admitted.length);
    running = [...running, ...admitted];
    const have_begun = running.filter(request => request.generated);
    const are_new = running.filter(request => !request.generated);
    const decodes = have_begun.map(request => [request, 1]);
    const prompts = are_new.map(request => [request, request.todo]);
    for (const plan of [decodes, prompts]) {
      if (!plan.length) continue;
      yield {step, plan, running, cost: layout(plan)};
      advance(plan);
    }
    running = running.filter(request => !request.finished);
  }
}

function* scheduled(scheduler, layout, passes_of = plan => [plan]) {
  for (let step = 0; scheduler.busy; step++) {
    step = scheduler.next_step(step);
    for (const plan of passes_of(scheduler.schedule(step))) {
      if (!plan.length) continue;
      yield {step, plan, running: scheduler.running, pool: scheduler.pool, cost: layout(plan)};
      scheduler.update(plan);
    }
  }
}

function decodes_and_chunks(plan) {
  const decodes = plan.filter(([{todo}]) => todo === 1);
  const chunks = plan.filter(([{todo}]) => todo > 1);
  return [decodes, chunks];
}

const STAGES = {   // unbatched is dynamic with one request at a time
  unbatched: (requests, knobs, clock) => dynamic(requests, {max_batch: 1}, clock, alone),
  naive, dynamic,
  chunked: (...load) => scheduled(new Scheduler(...load), rectangle, decodes_and_chunks),
  interleaved: (...load) => scheduled(new Scheduler(...load), rectangle),
  ragged: (...load) => scheduled(new Scheduler(...load), flat),
  paged: (...load) => scheduled(new PagedScheduler(...load), flat),
  prefix: (...load) => scheduled(new PrefixScheduler(...load), flat)};

// --- toolbox/trace.py, lab/simulate: what happened, and when -------------------------------------

// Returns {requests, passes, pool}. A pass has what page.run_data has as columns. gpu: of
// page.gpu_data; knobs: Python's, and `in_ms`: arrivals are ms on the calculated clock, not steps.
// Requests that could never run have a reason in `refused`.
export function simulate(stage, load, knobs, gpu) {
  const requests = load.map((lengths, number) => new Request(lengths, number));
  const clock = new Clock(knobs.in_ms), passes = [];
  const queue = requests.filter(({refused}) => !refused).sort((a, b) => a.arrival - b.arrival);
  let pool = null;
  for (const batch of STAGES[stage](queue, knobs, clock)) {
    const {step} = batch, before = passes.at(-1);
    const due = requests_due(batch.plan);
    const pass = record_pass(batch, gpu, due.length);
    pass.start = before?.step === step ? before.start : clock.now;   // of the step
    pass.room = room_changes(requests, batch);
    passes.push(pass);
    clock.now += pass.ms;
    for (const request of due) {
      request.token_steps.push(step);
      request.token_times.push(clock.now);
    }
    pool = batch.pool ? {pages: batch.pool.number, page_size: batch.pool.page_size} : null;
  }
  return {requests, passes, pool};
}

function record_pass(batch, gpu, sampled) {   // as Trace and Recorder
  const {step, plan, running, pool, columns = 0, cost} = batch, {shape} = cost;
  const slots = shape.reduce((a, b) => a * b);
  const finished = plan.filter(([, n]) => n === 0).map(([request]) => request.number);
  const work = [];
  let planned = 0, own_keys = 0, useful = 0, useful_scores = 0;
  for (const [request, n] of plan) {
    if (!n) continue;
    const first = request.computed, end = first + n;
    const fresh = Math.max(0, end - Math.max(first, request.reached));
    work.push(request.number, first, n);
    planned += n;
    own_keys += end;
    useful += fresh;
    useful_scores += fresh * (2 * end - fresh + 1) / 2;   // the sum of end - fresh + 1 .. end
    request.reached = Math.max(request.reached, end);
  }
  return {
    step, shape, slots, work, finished, useful, useful_scores, columns,
    ms: milliseconds(gpu, slots, cost, sampled),
    recomputed: planned - useful,
    pad_slots: slots - planned - finished.length,
    finished_slots: finished.length,
    score_entries: cost.scores,
    padded_keys: cost.keys - own_keys,
    copied_bytes: cost.copied * gpu.kv_bytes,
    at_once: running.length,
    reserved: reserved_tokens(batch),
    cached: pool?.cached_and_free ?? []};
}

function reserved_tokens({plan, running, pool, capacity}) {
  if (pool) return (pool.number - pool.free_pages) * pool.page_size;
  if (capacity) return capacity * plan.length;   // a static batch: its rows are as long
  return sum(running.map(request => request.kv_capacity));
}

// {request: its capacity, block table or null}, where it differs from the last pass.
function room_changes(requests, {running, capacity}) {
  const changes = {};
  for (const request of requests) {
    const holds = running.includes(request);
    const table = holds ? request.block_table : null;
    const tokens = holds ? capacity ?? request.kv_capacity : null;
    const room = table ?? tokens;
    // A block table is the same array all the time, and only grows.
    const is_same = room === request.room && table?.length === request.room_pages;
    if (is_same) continue;
    request.room = room;
    request.room_pages = table?.length;
    changes[request.number] = table ? [...table] : room;
  }
  return changes;
}

function milliseconds(c, slots, {scores, keys, copied}, sampled) {   // Shape.seconds
  const arithmetic = (slots + c.tile) * c.row + sampled * c.sample + scores * c.score;
  const vocabulary = sampled ? c.vocabulary : 0;
  const reading = c.weights + vocabulary + (keys + slots) * c.key + copied * c.copy;
  return 1e3 * (Math.hypot(arithmetic, reading) + c.overhead + c.per_request * sampled);
}
