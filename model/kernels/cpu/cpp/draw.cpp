// Draws a token from each row of logits: the mask of a grammar, temperature, min-p, top-k, top-p.
//
// A row is read a few times and never sorted. The largest logit of each chunk comes first: from then
// on a pass leaves out every chunk that lies below what is kept, which of a trained model's row are
// nearly all. Top-k needs the k largest alone, and k chunks have one each: what lies below the
// smallest of these is none. Top-p sorts the one bin in which the mass is reached.

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "simd.h"

namespace {

constexpr int64_t CHUNK = 128;
constexpr int BINS = 1024;
constexpr float NONE = -std::numeric_limits<float>::infinity();

// What rows of one call have in common. What is left out is null: all rows are greedy, all tokens
// allowed, all kept.
struct Batch {
  const float *logits, *temperature;
  const double* uniform;
  const uint32_t* allowed;  // bit i % 32 of word i / 32
  const int64_t* top_k;     // 0 keeps all
  const float *top_p, *log_min_p;
  int64_t vocab_size, stride, num_words;
};

struct Candidate {
  float value;
  int32_t token;
  float weight;

  bool operator<(const Candidate& other) const {
    return value != other.value ? value > other.value : token < other.token;
  }
};

// One row. Its values are logits below its largest one, divided by the temperature.
class Row {
 public:
  Row(const Batch& batch, int64_t row)
      : batch_(batch),
        logits_(batch.logits + row * batch.stride),
        allowed_(batch.allowed ? batch.allowed + row * batch.num_words : nullptr),
        size_(batch.vocab_size),
        temperature_(batch.temperature[row]),
        row_(row) {}

  int64_t draw() {
    find_largest();
    if (!(temperature_ > 0) || best_ == NONE) return likeliest();
    for (float& value : highest_) value = (value - best_) / temperature_;
    if (batch_.log_min_p) floor_ = batch_.log_min_p[row_];
    if (batch_.top_k && batch_.top_k[row_] > 0 && batch_.top_k[row_] < size_)
      keep_top_k(batch_.top_k[row_]);
    double total = weigh();
    if (batch_.top_p && batch_.top_p[row_] < 1) {
      keep_top_p(batch_.top_p[row_], total);
      total = weigh();
    }
    return token_at(batch_.uniform[row_] * total);
  }

 private:
  const Batch& batch_;
  const float* logits_;
  const uint32_t* allowed_;
  const int64_t size_;
  const float temperature_;
  const int64_t row_;
  float best_ = NONE;
  std::vector<float> highest_;  // of each chunk its largest logit, later its largest value
  std::vector<double> masses_;  // of each chunk
  // Kept are values above the floor, and those at it of tokens up to the last.
  float floor_ = NONE;
  int32_t last_ = std::numeric_limits<int32_t>::max();

  int64_t num_chunks() const { return (size_ + CHUNK - 1) / CHUNK; }

  // Tokens that are not allowed, and those behind the vocabulary, are -inf.
  f32v logits_at(int64_t i) const {
    const i32v lane = by_lane([](int j) { return j; });
    f32v found = i + LANES <= size_ ? load(logits_ + i) : load_part(logits_ + i, size_ - i);
    if (i + LANES > size_) found = lane < (int32_t)(size_ - i) ? found : f32v{} + NONE;
    if (!allowed_) return found;
    const u32v bits = (u32v{} + (allowed_[i / 32] >> i % 32)) >> (u32v)lane & 1;
    return bits != 0 ? found : f32v{} + NONE;
  }

  f32v values_at(int64_t i) const { return (logits_at(i) - best_) / temperature_; }

  f32v weights_at(int64_t i) const {
    const f32v values = values_at(i), floor = f32v{} + floor_;
    const i32v token = by_lane([](int j) { return j; }) + (int32_t)i;
    const i32v is_kept = (values > floor) | ((values == floor) & (token <= last_));
    return is_kept ? exp_of_negative(values) : f32v{};
  }

  // Calls f with the place of each vector of a chunk.
  template <class F>
  void visit(int64_t chunk, F f) const {
    const int64_t end = std::min(size_, (chunk + 1) * CHUNK);
    for (int64_t i = chunk * CHUNK; i < end; i += LANES) f(i);
  }

  // The same of all chunks that have a value from `lowest` on.
  template <class F>
  void visit_from(float lowest, F f) const {
    for (int64_t chunk = 0; chunk < num_chunks(); chunk++)
      if (highest_[chunk] >= lowest) visit(chunk, f);
  }

  // What is no number is never larger.
  void find_largest() {
    highest_.resize(num_chunks());
    for (int64_t chunk = 0; chunk < num_chunks(); chunk++) {
      f32v found = f32v{} + NONE;
      visit(chunk, [&](int64_t i) { found = larger(logits_at(i), found); });
      highest_[chunk] = fold<larger>(found);
      best_ = std::max(best_, highest_[chunk]);
    }
  }

  // The first of the largest logits; 0 where there is none.
  int64_t likeliest() const {
    for (int64_t chunk = 0; chunk < num_chunks() && best_ > NONE; chunk++) {
      if (highest_[chunk] != best_) continue;
      for (int64_t i = chunk * CHUNK;; i += LANES) {
        const f32v found = logits_at(i);
        for (int j = 0; j < LANES; j++)
          if (found[j] == best_) return i + j;
      }
    }
    return 0;
  }

  // Ties with the k-th token are kept.
  void keep_top_k(int64_t k) {
    float lowest = floor_;
    if (k <= num_chunks()) {
      std::vector<float> heads(highest_);
      std::nth_element(heads.begin(), heads.begin() + (k - 1), heads.end(), std::greater<>());
      lowest = std::max(lowest, heads[k - 1]);
    }
    std::vector<float> found;
    visit_from(lowest, [&](int64_t i) {
      const f32v values = values_at(i);
      for (int j = 0; j < LANES; j++)
        if (values[j] >= lowest && values[j] > NONE) found.push_back(values[j]);
    });
    if ((int64_t)found.size() < k) return;
    std::nth_element(found.begin(), found.begin() + (k - 1), found.end(), std::greater<>());
    floor_ = std::max(floor_, found[k - 1]);
  }

  // The fewest of the likeliest tokens whose mass reaches p, the lowest ids among equals.
  void keep_top_p(float p, double total) {
    // Tokens below a V-th of 1 - p have less than 1 - p together; half of that is for rounding.
    const float cut = (float)std::log((1.0 - p) / 2 * total / size_);
    const float lowest = std::max(floor_, cut);
    const float scale = lowest < 0 ? (BINS - 1) / -lowest : 0;
    std::vector<double> masses(BINS);
    const auto bins_of = [&](f32v values) {
      return __builtin_convertvector(values >= lowest ? values * -scale : f32v{}, i32v);
    };
    visit_from(lowest, [&](int64_t i) {
      const f32v values = values_at(i), weights = values >= lowest ? weights_at(i) : f32v{};
      const i32v bins = bins_of(values);
      for (int j = 0; j < LANES; j++) masses[bins[j]] += weights[j];
    });
    int bin = 0;
    double before = 0;
    for (int i = 0; i < BINS && before < p * total; before += masses[i++])
      if (masses[i] > 0) bin = i;
    before = 0;
    for (int i = 0; i < bin; i++) before += masses[i];
    std::vector<Candidate> edge;
    visit_from(lowest, [&](int64_t i) {
      const f32v values = values_at(i), weights = values >= lowest ? weights_at(i) : f32v{};
      const i32v bins = bins_of(values);
      for (int j = 0; j < LANES; j++)
        if (bins[j] == bin && weights[j] > 0)
          edge.push_back({values[j], (int32_t)i + j, weights[j]});
    });
    std::sort(edge.begin(), edge.end());
    for (const Candidate& candidate : edge) {
      if (!(before < p * total)) break;
      floor_ = candidate.value, last_ = candidate.token;
      before += candidate.weight;
    }
  }

  double weigh() {
    double total = 0;
    masses_.assign(num_chunks(), 0);
    for (int64_t chunk = 0; chunk < num_chunks(); chunk++) {
      if (!(highest_[chunk] >= floor_)) continue;
      f32v sums = f32v{};
      visit(chunk, [&](int64_t i) { sums += weights_at(i); });
      total += masses_[chunk] = fold<plus>(sums);
    }
    return total;
  }

  // The first token up to which there is more mass than `target`, else the last one that has any.
  int64_t token_at(double target) const {
    double before = 0;
    int64_t chunk = -1;
    for (int64_t i = 0; i < num_chunks(); i++) {
      if (!(masses_[i] > 0)) continue;
      if (chunk >= 0) before += masses_[chunk];
      chunk = i;
      if (before + masses_[i] > target) break;
    }
    if (chunk < 0) return likeliest();
    int64_t token = 0;
    bool is_found = false;
    visit(chunk, [&](int64_t i) {
      const f32v weights = weights_at(i);
      for (int j = 0; j < LANES && !is_found; j++) {
        if (!(weights[j] > 0)) continue;
        token = i + j;
        before += weights[j];
        is_found = before > target;
      }
    });
    return token;
  }
};

}  // namespace

// tokens: int64 [B]; sizes: threads, B, vocabulary, a row's stride, a mask's words.
extern "C" void draw(const float* logits, const float* temperature, const double* uniform,
                     const uint32_t* allowed, const int64_t* top_k, const float* top_p,
                     const float* log_min_p, int64_t* tokens, const int64_t* sizes) {
  const int64_t threads = sizes[0], num_rows = sizes[1], vocab_size = sizes[2];
  const Batch batch{logits, temperature, uniform,    allowed,  top_k,
                    top_p,  log_min_p,   vocab_size, sizes[3], sizes[4]};
#pragma omp parallel for num_threads(threads) if (threads > 1 && num_rows * vocab_size > ALONE) \
    schedule(dynamic)
  for (int64_t row = 0; row < num_rows; row++) tokens[row] = Row(batch, row).draw();
}
