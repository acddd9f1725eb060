// Penalties for tokens that a sequence has already, in one pass over its row.

#include "simd.h"

namespace {

// One row: its logits, how often its output has each token, and whether its prompt does.
struct Row {
  const float* logits;
  const int32_t* counts;
  const uint8_t* is_in_prompt;
  float presence, frequency, repetition;

  f32v at(int64_t i, int64_t n) const {
    const f32v found = n == LANES ? load(logits + i) : load_part(logits + i, n);
    i32v count{};
    u8v prompt{};
    memcpy(&count, counts + i, n * sizeof(int32_t));
    memcpy(&prompt, is_in_prompt + i, n);
    const i32v in_output = count > 0, is_seen = in_output | (widen(prompt) != 0);
    const f32v one = f32v{} + 1.0f, factor = is_seen ? f32v{} + repetition : one;
    const f32v repeated = found > 0.0f ? found / factor : found * factor;
    return repeated - __builtin_convertvector(count, f32v) * frequency -
           (in_output ? f32v{} + presence : f32v{});
  }
};

}  // namespace

// counts and is_in_prompt: [R, V], of which rows [B] says where each has its own; out: [B, V].
// sizes: threads, B, V, a row's stride.
extern "C" void penalise(const float* logits, const int32_t* counts, const uint8_t* is_in_prompt,
                         const int64_t* rows, const float* presence, const float* frequency,
                         const float* repetition, float* out, const int64_t* sizes) {
  const int64_t threads = sizes[0], num_rows = sizes[1], size = sizes[2];
#pragma omp parallel for num_threads(threads) if (threads > 1 && num_rows * size > ALONE)
  for (int64_t b = 0; b < num_rows; b++) {
    const int64_t table = rows[b] * size;
    const Row row{logits + b * sizes[3], counts + table, is_in_prompt + table,
                  presence[b],           frequency[b],   repetition[b]};
    float* to = out + b * size;
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) store(to + i, row.at(i, LANES));
    if (i < size) store_part(to + i, row.at(i, size - i), size - i);
  }
}
