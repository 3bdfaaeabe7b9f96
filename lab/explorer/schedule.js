// The twin: what the ladder's stages do with a load, computed once more in a browser. Which tokens
// are in which pass depends on lengths alone, so there is no model here, and no token:
//
//     simulate("paged", [{prompt: 20, answer: 5}, {prompt: 9, answer: 3, arrival: 2}],
//              {max_batch: 8, token_budget: 32, pages: 26, page_size: 16}, gpu)
//
// A stage is a generator that yields a batch where the Python file makes a forward pass. Names and
// order are those of the Python files, which say why; tests/test_page.py compares every pass of
// random loads. Out of scope: the policies of beyond/fairness.py, ragged's "mask", prepacking.

const sum = values => values.reduce((a, b) => a + b, 0);
const largest = values => values.reduce((a, b) => Math.max(a, b), 0);

// --- request.py ----------------------------------------------------------------------------------

class Request {
  // prompt, answer, limit: numbers of tokens; limit: of the longest answer that it may get
  // shared: so many of its first tokens are those with which the other requests begin
  // tokens: ids of prompt and answer, if they are known; then these say what is shared
  constructor({prompt, answer, limit = answer, arrival = 0, shared = 0, tokens = null}, number) {
    Object.assign(this, {number, prompt, answer, limit, arrival, shared, tokens});
    Object.assign(this, {computed: 0, generated: 0, reached: 0, block_table: null, refused: ""});
    Object.assign(this, {token_steps: [], token_times: [], table: null, room: 0});
  }

  get todo() { return this.prompt + this.generated - this.computed; }
  get kv_tokens() { return this.prompt + this.limit - 1; }
  get finished() { return this.generated === this.answer; }
}

const requests_due = plan => plan.filter(([request, n]) => n === request.todo).map(part => part[0]);

function advance(plan) {
  const sampled = requests_due(plan);
  for (const [request, n] of plan) request.computed += n;
  for (const request of sampled) request.generated += 1;
}

// Arrivals are steps, or with `in_ms` milliseconds of this clock.
class Clock {
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
    Object.assign(this, {max_batch, token_budget, max_kv_tokens: max_kv_tokens ?? Infinity, clock});
    Object.assign(this, {waiting: [], running: [], waits_for: ""});
    for (const request of requests) this.add(request);
  }

  add(request) {                         // Python refuses the whole run
    if (request.kv_tokens <= this.max_kv_tokens) this.waiting.push(request);
    else request.refused = `${request.kv_tokens} KV tokens, there are ${this.max_kv_tokens}`;
  }

  schedule(step) {
    this.admit(step);
    const plan = this.share_budget();
    if (!plan.length) throw Error(`step ${step}: nothing can go on`);
    return plan;
  }

  admit(step) {                          // waits_for: what keeps the first in the queue out
    let todo = sum(this.running.map(request => request.todo));
    while (this.running.length < this.max_batch && todo < this.token_budget) {
      this.waits_for = "memory";
      if (!this.arrived(step) || !this.grant_room(this.waiting[0])) return;
      this.running.push(this.waiting.shift());
      todo += this.running.at(-1).todo;
    }
    this.waits_for = this.running.length < this.max_batch ? "the token budget" : "a place";
  }

  share_budget() {
    const plan = this.running.filter(request => request.todo === 1).map(request => [request, 1]);
    let budget = this.token_budget - plan.length;
    for (const request of this.running) {
      if (request.todo > 1 && budget > 0) {
        const n = Math.min(request.todo, budget);
        plan.push([request, n]);
        budget -= n;
      }
    }
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

  grant_room(request) {
    const reserved = sum(this.running.map(other => other.kv_tokens));
    return reserved + request.kv_tokens <= this.max_kv_tokens;
  }
  free() {}
}

// --- paging.py -----------------------------------------------------------------------------------

class Pages {
  constructor(number, size) {
    Object.assign(this, {number, size, counts: {preemptions: 0}});
    this.free_queue = new Set(Array(number).keys());   // a Set keeps the order
  }

  needed(tokens) { return Math.ceil(tokens / this.size); }

  take() {                               // Python: popleft, popitem
    const [page] = this.free_queue;
    this.free_queue.delete(page);
    return page;
  }

  allocate(table, number) {
    for (let i = 0; i < number; i++) table.push(this.take());
  }

  free(table) {
    for (const page of table) this.free_queue.add(page);
  }
}

function pool_size(requests, {max_batch, page_size, pages = null}) {
  const needed = requests.map(({kv_tokens}) => Math.ceil(kv_tokens / page_size));
  if (pages !== null) return Math.min(pages, sum(needed));
  return sum(needed.sort((a, b) => b - a).slice(0, max_batch));
}

class PagedScheduler extends Scheduler {
  constructor(requests, knobs, clock, Kind = Pages) {
    const number = pool_size(requests, knobs);
    super(requests, {...knobs, max_kv_tokens: number * knobs.page_size}, clock);
    this.pages = new Kind(number, knobs.page_size);
  }

  schedule(step) {
    for (const request of [...this.running]) {
      const need = this.pages.needed(request.computed + request.todo);
      while (this.running.includes(request) && request.block_table.length < need) {
        if (this.pages.free_queue.size) this.pages.allocate(request.block_table, 1);
        else this.preempt(this.running.at(-1));
      }
    }
    return super.schedule(step);
  }

  preempt(request) {
    this.running.pop();
    this.free(request);
    request.computed = 0;
    this.waiting.unshift(request);
    this.pages.counts.preemptions += 1;
  }

  grant_room(request) {
    const need = this.pages.needed(request.todo);
    if (need > this.pages.free_queue.size) return false;
    request.block_table = [];
    this.pages.allocate(request.block_table, need);
    return true;
  }

  free(request) {
    this.pages.free(request.block_table);
    request.block_table = null;
  }
}

// --- generate_prefix.py --------------------------------------------------------------------------

// The name of a full page that ends before position `end`: of its tokens, and all before them.
function page_hash({number, shared, tokens}, end) {
  if (tokens) return tokens.slice(0, end).join(" ");
  return end <= shared ? `shared ${end}` : `${number}: ${end}`;
}

class PrefixPages extends Pages {
  constructor(number, size) {
    super(number, size);
    Object.assign(this.counts, {shared_pages: 0, saved_tokens: 0, evicted_pages: 0});
    Object.assign(this, {ref_count: Array(number).fill(0), cached: new Map(), hash_of: new Map()});
  }

  get in_order() {                       // the cached pages of the free queue
    return [...this.free_queue].filter(page => this.hash_of.has(page));
  }

  find(request, last) {                  // of its full pages before position `last`
    const found = [];
    for (let end = this.size; end <= last; end += this.size) {
      const page = this.cached.get(page_hash(request, end));
      if (page === undefined) break;
      found.push(page);
    }
    return found;
  }

  share(table, pages) {
    for (const page of pages) {
      this.free_queue.delete(page);
      this.ref_count[page] += 1;
      table.push(page);
    }
  }

  allocate(table, number) {
    for (let i = 0; i < number; i++) {
      const page = this.take();
      if (this.hash_of.has(page)) {
        this.cached.delete(this.hash_of.get(page));
        this.hash_of.delete(page);
        this.counts.evicted_pages += 1;
      }
      this.share(table, [page]);
    }
  }

  cache(page, hash) {
    if (this.cached.has(hash)) return;
    this.cached.set(hash, page);
    this.hash_of.set(page, hash);
  }

  free(table) {
    for (const page of [...table].reverse()) {
      this.ref_count[page] -= 1;
      if (!this.ref_count[page]) this.free_queue.add(page);
    }
  }
}

class PrefixScheduler extends PagedScheduler {
  constructor(...load) { super(...load, PrefixPages); }

  grant_room(request) {
    const {pages} = this, found = pages.find(request, request.todo - 1);
    const more = pages.needed(request.todo) - found.length;
    const free = found.filter(page => pages.free_queue.has(page)).length;
    if (more + free > pages.free_queue.size) return false;
    Object.assign(request, {block_table: [], computed: found.length * pages.size});
    pages.share(request.block_table, found);
    pages.allocate(request.block_table, more);
    pages.counts.shared_pages += found.length;
    pages.counts.saved_tokens += request.computed;
    return true;
  }

  update(plan) {
    const {size} = this.pages;
    for (const [request, n] of plan) {
      const full = Math.floor((request.computed + n) / size);
      for (let i = Math.floor(request.computed / size); i < full; i++) {
        this.pages.cache(request.block_table[i], page_hash(request, (i + 1) * size));
      }
    }
    super.update(plan);
  }
}

// --- layouts: the tensor's shape, the scores that attention computes, the keys that it reads and
// --- copies, in tokens of all rows

const first_of = ([request]) => request.computed, end_of = ([request, n]) => request.computed + n;

function alone([part]) {
  const [, n] = part, end = end_of(part);
  return {shape: [1, n], score_entries: n * end, keys: end, copied: 0};
}

function static_batch({length: B}, start, end) {
  const T = end - start;
  return {shape: [B, T], score_entries: B * T * end, keys: B * end, copied: 0};
}

function rectangle(plan) {
  const B = plan.length, T = largest(plan.map(([, n]) => n)), P = largest(plan.map(first_of));
  return {shape: [B, T], score_entries: B * T * (P + T), keys: B * (P + T),
          copied: B * P + B * (P + T)};
}

function flat(plan) {                    // a GPU reads pages through the table, and copies none
  return {shape: [sum(plan.map(([, n]) => n))], keys: sum(plan.map(end_of)), copied: 0,
          score_entries: sum(plan.map(part => part[1] * end_of(part)))};
}

// --- generate_*.py: each yields a batch where there is a forward pass ----------------------------

function* unbatched(waiting, knobs, clock) {
  let step = 0;
  for (const request of [...waiting]) {
    step = clock.next_step(step, request);
    waiting = waiting.slice(1);
    for (; !request.finished; step++) {
      const plan = [[request, request.todo]];
      yield {step, plan, running: [request], waiting, waits_for: "its turn", ...alone(plan)};
      advance(plan);
    }
  }
}

function* naive(waiting, {max_batch}, clock) {
  let step = 0;
  while (waiting.length) {
    step = clock.next_step(step, waiting[0]);
    const running = waiting.filter(one => clock.arrived(one, step)).slice(0, max_batch);
    waiting = waiting.slice(running.length);
    let start = 0, end = largest(running.map(({prompt}) => prompt));
    const capacity = end + largest(running.map(({limit}) => limit - 1)), waits_for = "the batch";
    for (; !running.every(({finished}) => finished); start = end++, step++) {
      const plan = running.map(request => [request, request.finished ? 0 : request.todo]);
      yield {step, plan, running, waiting, waits_for, columns: end, capacity,
             ...static_batch(plan, start, end)};
      advance(plan);
    }
  }
}

function* dynamic(waiting, {max_batch}, clock) {
  let running = [];
  for (let step = 0; waiting.length || running.length; step++) {
    if (!running.length) step = clock.next_step(step, waiting[0]);
    const arrived = waiting.filter(request => clock.arrived(request, step));
    const admitted = arrived.slice(0, max_batch - running.length);
    waiting = waiting.slice(admitted.length);
    running = [...running, ...admitted];
    const decodes = running.filter(one => one.generated).map(one => [one, 1]);
    const prompts = running.filter(one => !one.generated).map(one => [one, one.todo]);
    for (const plan of [decodes, prompts].filter(part => part.length)) {
      yield {step, plan, running, waiting, waits_for: "a place", ...rectangle(plan)};
      advance(plan);
    }
    running = running.filter(request => !request.finished);
  }
}

function* scheduled(scheduler, layout, passes_of = plan => [plan]) {
  for (let step = 0; scheduler.busy; step++) {
    step = scheduler.next_step(step);
    for (const plan of passes_of(scheduler.schedule(step)).filter(part => part.length)) {
      const {running, waiting, waits_for, pages} = scheduler;
      yield {step, plan, running, waiting, waits_for, pages, ...layout(plan)};
      scheduler.update(plan);
    }
  }
}

const two_passes = plan => [plan.filter(([{todo}]) => todo === 1),
                            plan.filter(([{todo}]) => todo > 1)];

const STAGES = {
  unbatched, naive, dynamic,
  chunked: (...load) => scheduled(new Scheduler(...load), rectangle, two_passes),
  interleaved: (...load) => scheduled(new Scheduler(...load), rectangle),
  ragged: (...load) => scheduled(new Scheduler(...load), flat),
  paged: (...load) => scheduled(new PagedScheduler(...load), flat),
  prefix: (...load) => scheduled(new PrefixScheduler(...load), flat)};

// --- toolbox/trace.py, lab/simulate: what happened, and when -------------------------------------

// Returns {stage, requests, passes, counts, pool}. gpu: of page.gpu_data; knobs: Python's, and
// `in_ms`: arrivals are milliseconds on the calculated clock, not steps. Requests that could never
// run have a reason in `refused`, and the others run.
export function simulate(stage, load, knobs, gpu) {
  const requests = load.map((lengths, number) => new Request(lengths, number));
  const queue = [...requests].sort((a, b) => a.arrival - b.arrival), clock = new Clock(knobs.in_ms);
  const passes = [];
  let pages = null;
  for (const batch of STAGES[stage](queue, knobs, clock)) {
    const sampled = requests_due(batch.plan), pass = record_pass(batch, clock);
    pass.room = room_changes(requests, batch);
    pass.ms = milliseconds(gpu, pass, sampled.length);
    clock.now += pass.ms;
    for (const request of sampled) {
      request.token_steps.push(batch.step);
      request.token_times.push(clock.now);
    }
    pages = batch.pages;
    passes.push(pass);
  }
  return {stage, requests, passes, counts: pages?.counts ?? {},
          pool: pages ? {pages: pages.number, page_size: pages.size} : null};
}

function record_pass(batch, clock) {
  const {step, plan, pages, shape, keys, copied, score_entries, waits_for} = batch;
  const {columns = 0, capacity} = batch;
  const work = [], finished = [], slots = shape.reduce((a, b) => a * b);
  let useful = 0, useful_scores = 0, planned = 0, own = 0;
  for (const [request, n] of plan) {
    if (!n) {
      finished.push(request.number);
      continue;
    }
    const first = request.computed, end = first + n;
    const fresh = Math.max(0, end - Math.max(first, request.reached));
    useful += fresh;
    useful_scores += fresh * (2 * end - fresh + 1) / 2;   // the sum of end - fresh + 1 .. end
    request.reached = Math.max(request.reached, end);
    work.push([request.number, first, n]);
    planned += n;
    own += end;
  }
  const waiting = batch.waiting.filter(request => clock.arrived(request, step));
  return {step, start: clock.now, shape, slots, work, finished, useful,
          recomputed: planned - useful, pad_slots: slots - planned - finished.length,
          finished_slots: finished.length, score_entries, useful_scores, keys,
          padded_keys: keys - own, copied, columns, at_once: batch.running.length,
          reserved: pages ? (pages.number - pages.free_queue.size) * pages.size
            : capacity ? capacity * plan.length : sum(batch.running.map(one => one.kv_tokens)),
          cached: pages?.in_order ?? [], waits_for, waiting: waiting.map(({number}) => number)};
}

// As Recorder.caches: a capacity or a block table of each request, where it differs from before.
function room_changes(requests, {running, capacity}) {
  const changes = {};
  for (const request of requests) {
    const table = running.includes(request) ? request.block_table : null;
    const size = table?.length ?? (running.includes(request) ? capacity ?? request.kv_tokens : 0);
    if (size === request.room && table === request.table) continue;
    Object.assign(request, {room: size, table});
    changes[request.number] = table?.slice() ?? (size || null);
  }
  return changes;
}

// As Shape.seconds of lab/simulate/hardware.py, on one GPU.
function milliseconds(gpu, {slots, score_entries, keys, copied}, sampled) {
  const rows = slots + gpu.tile, weights = gpu.linears + (sampled ? gpu.vocabulary : 0);
  const operations = 2 * rows * gpu.linears + 2 * sampled * gpu.vocabulary
    + 4 * gpu.width * score_entries;
  const moved = weights * gpu.size + (keys + slots + 2 * copied) * gpu.kv_bytes;
  const computing = Math.hypot(operations / gpu.peak, moved / gpu.bandwidth);
  return 1e3 * (computing + gpu.overhead + gpu.per_request * sampled);
}
