// What a step spends its time on, for float32 on a CPU: multiplications by a weight matrix, and
// attention through a block table. Compiled at first use (native.py), which takes two seconds.
//
// Nearly everything is a multiplication of a few rows by a matrix, and goes through one function,
// `tile`. It keeps a small rectangle of the result in registers:
//
//        k                    COLS x W columns             w: for each k the columns side by side
//      +-----+                 +-------------+
// ROWS |  x  |  k   x   k      |      w      |             per k: COLS loads of w, ROWS of x, and
//      +-----+                 +-------------+             ROWS x COLS multiply-adds, none of which
//                                                          waits for another
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <omp.h>
#include <vector>
#ifdef __aarch64__
#include <arm_neon.h>
#else
#include <immintrin.h>
#endif

using std::min;
typedef int64_t i64;

#if defined(__AVX512F__)                          // 32 registers of 16 numbers
constexpr i64 W = 16, COLS = 3, ROWS = 8, SIDE = 4;
#elif defined(__AVX2__) && defined(__FMA__)       // 16 registers of 8
constexpr i64 W = 8, COLS = 2, ROWS = 6, SIDE = 2;
#elif defined(__ARM_NEON)                         // 32 registers of 4
constexpr i64 W = 4, COLS = 4, ROWS = 6, SIDE = 1;
#else
#error "a processor for which these sizes were not chosen: torch's own kernels are better"
#endif
constexpr i64 PANEL = COLS * W;    // columns of the result that are computed together
constexpr i64 LINE = 16;           // numbers in a cache line
constexpr i64 DEPTH = 768;         // so much of k that a panel's piece of w stays in the L2 cache
typedef float vec __attribute__((vector_size(4 * W), aligned(4), may_alias));
typedef int32_t places __attribute__((vector_size(4 * W)));

// The order of additions decides the last bits of a sum. A request's numbers are added in the same
// order whatever else is in the step (docs/kernels.md): by the helpers below, and by loops that add
// one after the other. For `omp simd reduction(+)` a compiler chooses an order, perhaps from an
// address; there is none here. And it may round a * b before it adds c, or not, in each copy of a
// loop as it likes. So it is told never to merge the two (-ffp-contract=off, native.py), and where
// they are to be merged, this function or std::fma says so.
static inline vec multiply_add(vec a, vec b, vec c) {
#if defined(__AVX512F__)
    return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__)
    return _mm256_fmadd_ps(a, b, c);
#elif defined(__aarch64__)
    return (vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return _mm_fmadd_ps(a, b, c);                 // ARM's sizes, tested on another processor
#endif
}

// The sums of neighbours: a0 + a1, a2 + a3, ..., then those of b
static inline vec pairs(vec a, vec b) {
    places even, odd;
    for (i64 j = 0; j < W; j++) even[j] = 2 * j, odd[j] = 2 * j + 1;
    return __builtin_shuffle(a, b, even) + __builtin_shuffle(a, b, odd);
}

// The first n numbers, then zeros
static inline vec first(const float* numbers, i64 n) {
    vec found = {};
    std::memcpy(&found, numbers, 4 * n);
    return found;
}

// of(x0) + of(x1) + ... for n numbers: number i is added in lane i % W, then the lanes are added.
// of(0) must be 0.
template <typename Of> static inline float sum(const float* x, i64 n, Of of) {
    vec lanes = {};
    i64 i = 0;
    for (; i + W <= n; i += W) lanes += of(*(const vec*)(x + i));
    if (i < n) lanes += of(first(x + i, n - i));
    for (i64 j = 1; j < W; j *= 2) lanes = pairs(lanes, lanes);
    return lanes[0];
}

// Where numbers[i] is, as an integer: what is fetched ahead may lie beyond an allocation's end, where
// a pointer must not even point. A prefetch does not fault there.
static inline uintptr_t place(const float* numbers, i64 i) { return uintptr_t(numbers) + 4 * i; }
static inline void fetch(uintptr_t from, i64 numbers) {
    for (i64 i = 0; i < numbers; i += 16) __builtin_prefetch((const void*)(from + 4 * i));
}

// y (R, cols) += x (R, k) w (k, C * W). `ahead`: what is read next, fetched meanwhile: a row of it at
// every so many steps. Evenly, so that the memory is busy all the time: in the first steps alone they
// would wait for it, and it would rest in the others.
template <i64 R, i64 C>
static void tile(const float* x, i64 x_row, const float* w, i64 w_row, float* y, i64 y_row,
                 i64 k, i64 cols, uintptr_t ahead, i64 every) {
    vec sum[R][C] = {};
    for (i64 i = 0, wait = every; i < k; i++) {
        vec b[C];
        for (i64 c = 0; c < C; c++) b[c] = *(const vec*)(w + i * w_row + c * W);
        if (--wait == 0) {
            for (i64 c = 0; c < C; c++) __builtin_prefetch((const void*)(ahead + 4 * c * W));
            ahead += 4 * w_row;
            wait = every;
        }
        for (i64 r = 0; r < R; r++) {
            vec a = x[r * x_row + i] - vec{};     // the same number in all places
            for (i64 c = 0; c < C; c++) sum[r][c] = multiply_add(a, b[c], sum[r][c]);
        }
    }
    for (i64 r = 0; r < R; r++)
        if (cols == C * W)
            for (i64 c = 0; c < C; c++) *(vec*)(y + r * y_row + c * W) += sum[r][c];
        else
            for (i64 j = 0; j < cols; j++) y[r * y_row + j] += sum[r][j / W][j % W];
}

typedef void Tile(const float*, i64, const float*, i64, float*, i64, i64, i64, uintptr_t, i64);

// The tile for these many rows and vectors, 1..ROWS and 1..COLS.
template <i64 R = ROWS, i64 C = COLS>
static Tile* tile_of(i64 rows, i64 vecs) {
    if (rows == R && vecs == C) return tile<R, C>;
    if constexpr (R > 1) if (rows < R) return tile_of<R - 1, C>(rows, vecs);
    if constexpr (C > 1) return tile_of<R, C - 1>(rows, vecs);
    return nullptr;
}

// exp(x) to 2e-7, in a form that the compiler turns into vector instructions; NaN stays NaN
static inline float exponential(float x) {
    float in = x;
    x = x > -87.f ? x < 88.f ? x : 88.f : -87.f;  // NaN, too, becomes a number that has an int
    float n = std::nearbyint(x * 1.44269504f);
    float r = std::fma(n, 2.12194440e-4f, std::fma(n, -.693359375f, x));
    float p = std::fma(r, 1 / 720.f, 1 / 120.f);
    p = std::fma(r, std::fma(r, std::fma(r, p, 1 / 24.f), 1 / 6.f), .5f);
    p = std::fma(r, std::fma(r, p, 1.f), 1.f);
    int32_t bits = (int32_t(n) + 127) << 23;      // 2^n
    float power;
    std::memcpy(&power, &bits, 4);
    return in == in ? p * power : in;
}

static inline float gelu(float x) {               // the tanh form: x * sigmoid(2 z)
    return x / (1 + exponential(-1.595769122f * (x + .044715f * x * x * x)));
}

static inline float silu(float x) { return x / (1 + exponential(-x)); }

// A weight (n, k) and a bias (n). The weight lies as (panels, k, PANEL): columns of the result that
// are computed together lie together, and the last panel is filled up with zeros.
struct Matrix {
    const float *packed, *bias;
};

enum After { NOTHING, GELU, GATE, ADD };

// y (m, n) = x (m, k) weight^T + bias; through GELU; times silu(gate); or with ADD y += that. Called
// by all threads of a team, which share the panels; it does not wait for the others. With the same n
// a thread gets the same panels, so that the gate may come from a call before.
static void linear(const float* x, Matrix weight, float* y, i64 m, i64 k, i64 n,
                   After after = NOTHING, const float* gate = nullptr) {
    i64 blocks = (m + ROWS - 1) / ROWS;
    if (!m) return;
    #pragma omp for schedule(static) nowait
    for (i64 first = 0; first < n; first += PANEL) {
        i64 cols = min(PANEL, n - first);
        for (i64 r = 0; r < m; r++)
            for (i64 j = 0; j < cols; j++) {
                float bias = weight.bias ? weight.bias[first + j] : 0;
                float& sum = y[r * n + first + j];
                sum = after == ADD ? sum + bias : bias;
            }
        for (i64 at = 0; at < k; at += DEPTH) {
            i64 depth = min(DEPTH, k - at);
            const float* w = weight.packed + first * k + at * PANEL;
            for (i64 block = 0; block < blocks; block++) {
                i64 r = m * block / blocks, rows = m * (block + 1) / blocks - r;   // equal parts
                // While one piece of w is multiplied, each block fetches its share of the next piece.
                tile_of(rows, COLS)(x + r * k + at, k, w, PANEL, y + r * n + first, n, depth, cols,
                                    place(w, (depth + depth * block / blocks) * PANEL), blocks);
            }
        }
        if (after == GELU)
            for (i64 r = 0; r < m; r++) {
                float* part = y + r * n + first;
                #pragma omp simd
                for (i64 j = 0; j < cols; j++) part[j] = gelu(part[j]);
            }
        if (after == GATE)
            for (i64 r = 0; r < m; r++) {
                float* part = y + r * n + first;
                const float* by = gate + r * n + first;
                #pragma omp simd
                for (i64 j = 0; j < cols; j++) part[j] *= silu(by[j]);
            }
    }
}

// scores (s) -> probabilities, of the first `seen`; zeros up to `all`
static void softmax(float* scores, i64 seen, i64 all) {
    float most = -INFINITY;
    #pragma omp simd reduction(max : most)
    for (i64 s = 0; s < seen; s++) most = scores[s] > most ? scores[s] : most;
    #pragma omp simd
    for (i64 s = 0; s < seen; s++) scores[s] = exponential(scores[s] - most);
    float total = sum(scores, seen, [](vec x) { return x; });
    for (i64 s = 0; s < seen; s++) scores[s] /= total;
    std::fill(scores + seen, scores + all, 0.f);
}

// The keys or values of one request and one head, wherever its pages are.
struct Cache {
    float* pool;              // (slots, size) of this head
    const i64* table;         // its pages
    i64 page, size;
    float* operator[](i64 s) const { return pool + (table[s / page] * page + s % page) * size; }
};

constexpr i64 AHEAD = 16;     // values are fetched so many tokens before they are used
constexpr i64 MANY = 16;      // from so many queries on it pays to bring the values together

// Q queries (size) times W / Q keys, Q x W / Q products. Feature d is added in lane d % W, then the
// lanes are: an order that serves one query and many, and takes the keys as they lie. Meanwhile the
// keys W places further on are fetched, for a single query in the order in which they lie.
template <i64 Q>
static inline vec dots(const float* q, i64 row, const float* const* keys, i64 size) {
    constexpr i64 K = W / Q;
    i64 d = 0, fetched = 0;
    vec sums[W] = {};
    auto each = [&](auto load) {
        vec a[Q];
        for (i64 r = 0; r < Q; r++) a[r] = load(q + r * row + d);
        if (Q == 1)
            for (; fetched * size < min(d + W, size) * W; fetched++)
                fetch(place(keys[fetched + W], 0), size);
        #pragma GCC unroll 16
        for (i64 j = 0; j < K; j++) {
            vec b = load(keys[j] + d);
            if (Q > 1) __builtin_prefetch(keys[j + W] + d);
            for (i64 r = 0; r < Q; r++) sums[r * K + j] = multiply_add(a[r], b, sums[r * K + j]);
        }
    };
    for (; d + W <= size; d += W) each([](const float* x) { return *(const vec*)x; });
    if (d < size) each([&](const float* x) { return first(x, size - d); });
    #pragma GCC unroll 4
    for (i64 left = W / 2; left; left /= 2)
        #pragma GCC unroll 8
        for (i64 j = 0; j < left; j++) sums[j] = pairs(sums[2 * j], sums[2 * j + 1]);
    return sums[0];
}

// out (size) += weight * value
static inline void add(float* out, float weight, const float* value, i64 size) {
    i64 d = 0;
    for (; d + W <= size; d += W) {
        vec* o = (vec*)(out + d);
        *o = multiply_add(weight - vec{}, *(const vec*)(value + d), *o);
    }
    for (; d < size; d++) out[d] = std::fma(weight, value[d], out[d]);
}

struct Room {                 // of a thread
    std::vector<float> numbers;
    std::vector<const float*> places;
};

// n queries, `row` numbers apart. The first sees `start` keys and its own, each further one `grows`
// more: 1 for tokens of one head, 0 for heads of one token. What is read afterwards begins at `next`.
static void attention(const float* q, float* out, i64 row, Cache keys, Cache values,
                      uintptr_t next, i64 start, i64 n, i64 grows, Room& room) {
    i64 end = start + 1 + (n - 1) * grows, size = keys.size, all = (end + W - 1) / W * W;
    i64 width = n < MANY ? 0 : (size + W - 1) / W * W;
    room.numbers.resize(all * (ROWS + width));
    room.places.resize(2 * all);
    float *scores = room.numbers.data(), *dense = scores + ROWS * all;
    const float **key = room.places.data(), **value = key + all;   // where each one is
    for (i64 s = 0; s < end;) {
        const float *k = keys[s], *v = values[s];
        for (i64 stop = min(end, s + keys.page); s < stop; s++, k += size, v += size)
            key[s] = k, value[s] = v;
    }
    for (i64 s = end; s < all; s++) key[s] = key[end - 1], value[s] = value[end - 1];
    for (i64 s = 0; width && s < end; s++) {
        std::copy_n(value[s], size, dense + s * width);
        std::fill_n(dense + s * width + size, width - size, 0.f);
    }
    for (i64 i = 0; i < n; i += ROWS) {
        i64 rows = min(ROWS, n - i), seen = start + 1 + (i + rows - 1) * grows;
        const float* a = q + i * row;
        float* o = out + i * row;
        for (i64 s = 0; s < seen; s += W) {
            i64 r = 0;
            for (; r + SIDE <= rows; r += SIDE)
                for (i64 j = s; j < s + W; j += W / SIDE) {
                    vec found = dots<SIDE>(a + r * row, row, key + j, size);
                    for (i64 l = 0; l < SIDE; l++)
                        std::memcpy(scores + (r + l) * all + j, (float*)&found + l * (W / SIDE),
                                    4 * (W / SIDE));
                }
            for (; r < rows; r++)
                *(vec*)(scores + r * all + s) = dots<1>(a + r * row, row, key + s, size);
        }
        for (i64 r = 0; r < rows; r++) {
            softmax(scores + r * all, start + 1 + (i + r) * grows, seen);
            std::fill_n(o + r * row, size, 0.f);
        }
        // The values one after the other, in each of the two ways
        for (i64 d = 0; width && d < size; d += PANEL) {
            i64 cols = min(PANEL, size - d);
            tile_of(rows, (cols + W - 1) / W)(scores, all, dense + d, width, o + d, row, seen, cols,
                                              0, 0);
        }
        for (i64 s = 0; !width && s < seen; s++) {
            i64 left = s + AHEAD - end;
            fetch(left < 0 ? place(value[s + AHEAD], 0) : next + 4 * left * size, size);
            for (i64 r = 0; r < rows; r++)
                add(o + r * row, scores[r * all + s], value[s], size);
        }
    }
}

// What the step computes of one request. All fields have 8 bytes, as Python passes them.
struct Piece {
    i64 first, n;             // its new tokens in the stream
    i64 start;                // position of the first of them
    i64 wanted;               // of so many, the last ones, the logits are wanted
    const i64* table;         // its pages; a cache in one piece is a single page
    float* const* keys;       // of each layer: (heads, slots, size)
    float* const* values;
    i64 slots, page;          // tokens in its caches, and in a page
};

// The keys (or the values) of a request that one head of one layer keeps.
static Cache cache_of(const Piece& p, float* pool, i64 size, i64 head) {
    return {pool + head * p.slots * size, p.table, p.page, size};
}

// Writes the new keys and values, (N, heads * size), into the caches. It waits for all threads: a
// request may see what another one writes in the same step.
static void keep(const float* k, const float* v, i64 heads, i64 size, const Piece* pieces,
                 i64 requests, i64 layer) {
    #pragma omp for schedule(static)
    for (i64 item = 0; item < requests * heads; item++) {
        const Piece& p = pieces[item / heads];
        Cache keys = cache_of(p, p.keys[layer], size, item % heads);
        Cache values = cache_of(p, p.values[layer], size, item % heads);
        for (i64 i = 0; i < p.n; i++) {
            i64 from = (p.first + i) * heads * size + item % heads * size;
            float *key = keys[p.start + i], *value = values[p.start + i];
            std::copy_n(k + from, size, key);
            std::copy_n(v + from, size, value);
            if (sum(value, size, [](vec x) { return x * 0.f; }) != 0) {   // not finite
                std::fill_n(key, size, NAN);     // all queries that see it get NaN, as in the model;
                std::fill_n(value, size, 0.f);   // the others multiply it by 0, which would be NaN
            }
        }
    }
}

// Each query sees its request's keys up to its own position. q, out: (N, heads * size), of which
// `group` neighbours share a head of keys. Only the last `wanted` queries of a request if `last`.
static void attend(const float* q, float* out, i64 heads, i64 group, i64 size, const Piece* pieces,
                   i64 requests, i64 layer, bool last) {
    static thread_local Room room;
    i64 row = heads * size;
    i64 together = std::max<i64>(1, requests * heads / (8 * omp_get_num_threads()));
    // In the order in which keys lie: a cache in one piece has its heads side by side, a pool has
    // the pages of one head. What the processor fetches beyond a page is then needed soon.
    bool pool = pieces[0].page < pieces[0].slots;
    #pragma omp for schedule(dynamic, together) nowait
    for (i64 item = 0; item < requests * heads; item++) {
        const Piece& p = pieces[pool ? item % requests : item / heads];
        const Piece& following = pieces[pool ? (item + 1) % requests : item / heads];
        i64 h = pool ? item / requests : item % heads, head = h / group;
        Cache keys = cache_of(p, p.keys[layer], size, head);
        Cache values = cache_of(p, p.values[layer], size, head);
        i64 skip = last ? p.n - p.wanted : 0, n = p.n - skip;
        i64 at = (p.first + skip) * row + h * size;
        uintptr_t next = place(cache_of(following, following.keys[layer], size, head)[0],
                               pool ? 0 : p.slots * size);   // the next head's
        if (n == 1) {   // one token: a group's heads together, so that its keys are read once
            if (h % group == 0)
                attention(q + at, out + at, size, keys, values, next, p.start + skip, group, 0,
                          room);
        } else if (n > 0)
            attention(q + at, out + at, row, keys, values, next, p.start + skip, n, 1, room);
    }
}

struct Norm {
    const float *weight, *bias;   // LayerNorm; without a bias RMSNorm, which subtracts no mean
};

static void normalise(const float* in, float* out, Norm norm, i64 C, float eps) {
    float mean = norm.bias ? sum(in, C, [](vec x) { return x; }) / C : 0;
    for (i64 j = 0; j < C; j++) out[j] = in[j] - mean;
    float variance = sum(out, C, [](vec x) { return x * x; }) / C;
    float scale = 1 / std::sqrt(variance + eps);
    if (norm.bias)
        for (i64 j = 0; j < C; j++) out[j] = out[j] * scale * norm.weight[j] + norm.bias[j];
    else
        for (i64 j = 0; j < C; j++) out[j] = out[j] * scale * norm.weight[j];
}

static void normalise(const float* x, float* y, Norm norm, i64 m, i64 C, float eps) {
    #pragma omp for schedule(static)
    for (i64 r = 0; r < m; r++) normalise(x + r * C, y + r * C, norm, C, eps);
}

// Rotary positions: each pair of features (i, i + size / 2) of x (N, heads * size) turns by its
// token's own angle, after the norm if there is one. turns (N, size): cosines, then sines. It does
// not wait for the other threads.
static void turn(float* x, Norm norm, const float* turns, i64 N, i64 heads, i64 size, float eps) {
    #pragma omp for schedule(static) nowait
    for (i64 item = 0; item < N * heads; item++) {
        float *a = x + item * size, *b = a + size / 2;
        const float *cos = turns + item / heads * size, *sin = cos + size / 2;
        if (norm.weight) normalise(a, a, norm, size, eps);
        for (i64 i = 0; i < size / 2; i++) {
            float from = a[i];
            a[i] = from * cos[i] - b[i] * sin[i];
            b[i] = b[i] * cos[i] + from * sin[i];
        }
    }
}

// A null pointer: the model does not have that.
struct Layer {
    Norm ln_1;
    Matrix query, key, value, c_proj;
    Norm q_norm, k_norm, ln_2;
    Matrix c_gate, c_fc, c_proj_2;
};
struct Model {
    i64 layers, heads, group, size, C, hidden, vocabulary, positions;   // group: see attend
    const float *wte, *wpe, *frequencies, *eps;   // frequencies: radians per position, of each pair
    Norm ln_f;
    Matrix head;
};

extern "C" {

i64 panel_width() { return PANEL; }

// y (m, n) = x (m, k) weight^T + bias, perhaps through GELU
void multiply(const float* x, const float* packed, const float* bias, float* y,
              i64 m, i64 k, i64 n, i64 with_gelu, i64 threads) {
    #pragma omp parallel num_threads(threads)
    linear(x, {packed, bias}, y, m, k, n, with_gelu ? GELU : NOTHING);
}

// A forward pass of N tokens. logits: (wanted, vocabulary). Returns N; or, before anything is written,
// the first token whose id or position is beyond the embeddings.
// One pass at a time: all use the same room.
i64 step(const Model* model, const Layer* layers, const i64* tokens, const i64* positions, i64 N,
          const Piece* pieces, i64 requests, float* logits, i64 threads) {
    static std::vector<float> room;
    const Model& M = *model;
    for (i64 r = 0; r < N; r++)
        if (tokens[r] < 0 || tokens[r] >= M.vocabulary
            || (M.wpe && (positions[r] < 0 || positions[r] >= M.positions))) return r;
    i64 C = M.C, H = M.hidden, size = M.size, kv_heads = M.heads / M.group, m = N;
    i64 Q = M.heads * size, K = kv_heads * size;   // features of the queries; of the keys
    size_t needed = N * (C + std::max(C, Q) + Q + 2 * K + 2 * H + size) + LINE;
    room.resize(std::max(room.size(), needed));
    float* x = (float*)((uintptr_t(room.data()) + 4 * LINE - 1) / (4 * LINE) * (4 * LINE));
    float *y = x + N * C, *q = y + N * std::max(C, Q), *k = q + N * Q, *v = k + N * K;
    float *h = v + N * K, *gate = h + N * H, *turns = gate + N * H, eps = *M.eps;
    float scale = 1 / std::sqrt(float(size));
    #pragma omp parallel num_threads(threads) firstprivate(m)
    {
        #pragma omp for schedule(static)
        for (i64 r = 0; r < N; r++)
            for (i64 j = 0; j < C; j++)
                x[r * C + j] = M.wte[tokens[r] * C + j] + (M.wpe ? M.wpe[positions[r] * C + j] : 0);
        if (M.frequencies) {
            #pragma omp for schedule(static)
            for (i64 r = 0; r < N; r++)
                for (i64 i = 0; i < size / 2; i++) {
                    float angle = float(positions[r]) * M.frequencies[i];
                    turns[r * size + i] = std::cos(angle);
                    turns[r * size + i + size / 2] = std::sin(angle);
                }
        }

        for (i64 i = 0; i < M.layers; i++) {
            const Layer& layer = layers[i];
            bool last = i == M.layers - 1;
            normalise(x, y, layer.ln_1, m, C, eps);
            linear(y, layer.query, q, m, C, Q);
            linear(y, layer.key, k, m, C, K);
            linear(y, layer.value, v, m, C, K);
            #pragma omp barrier
            if (M.frequencies) {
                turn(q, layer.q_norm, turns, N, M.heads, size, eps);
                turn(k, layer.k_norm, turns, N, kv_heads, size, eps);
                #pragma omp barrier
            }
            #pragma omp for schedule(static) nowait   // `keep` waits
            for (i64 j = 0; j < N * Q; j++) q[j] *= scale;
            keep(k, v, kv_heads, size, pieces, requests, i);
            attend(q, y, M.heads, M.group, size, pieces, requests, i, last);
            #pragma omp barrier
            if (last) {   // from here on, only the tokens whose logits are wanted
                #pragma omp single
                for (i64 p = 0, to = 0; p < requests; p++)
                    for (i64 n = pieces[p].wanted; n > 0; n--, to++) {
                        i64 from = pieces[p].first + pieces[p].n - n;
                        std::memmove(x + to * C, x + from * C, 4 * C);
                        std::memmove(y + to * Q, y + from * Q, 4 * Q);
                    }
                m = 0;
                for (i64 p = 0; p < requests; p++) m += pieces[p].wanted;
            }
            linear(y, layer.c_proj, x, m, Q, C, ADD);
            #pragma omp barrier
            normalise(x, y, layer.ln_2, m, C, eps);
            if (layer.c_gate.packed) linear(y, layer.c_gate, gate, m, C, H);
            linear(y, layer.c_fc, h, m, C, H, layer.c_gate.packed ? GATE : GELU, gate);
            #pragma omp barrier
            linear(h, layer.c_proj_2, x, m, H, C, ADD);
            #pragma omp barrier
        }
        normalise(x, y, M.ln_f, m, C, eps);
        linear(y, M.head, logits, m, C, M.vocabulary);
        #pragma omp barrier
    }
    return N;
}

}  // extern "C"
