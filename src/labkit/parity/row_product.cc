// One row times a matrix that lies by output, y[n] = sum over k of x[k] * w[n][k], in float32 from weights in float32 or bfloat16.
// Decoding one token reads every weight once, so what counts is how fast memory is read: contiguous parts, one per thread, asked for ahead of time.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>
#include <utility>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

constexpr int64_t kLanes = 64;         // partial sums of one output: what the widest vectors keep in flight
constexpr int64_t kAheadBytes = 8192;  // how far ahead of the sum memory is asked for
constexpr int64_t kLineBytes = 64;
constexpr int64_t kWorthAThread = 60000;  // weights below which waking a thread takes longer than the product

inline float Widen(float value) { return value; }

inline float Widen(uint16_t value) {  // a bfloat16 is the upper half of a float32
  uint32_t bits = static_cast<uint32_t>(value) << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof wide);
  return wide;
}

template <typename T>
void Rows(const float* x, const T* w, float* y, int64_t width, int64_t first, int64_t last) {
  for (int64_t n = first; n < last; ++n) {
    const T* row = w + n * width;
    float sums[kLanes] = {0};
    int64_t k = 0;
    for (; k + kLanes <= width; k += kLanes) {
      const char* ahead = reinterpret_cast<const char*>(row + k) + kAheadBytes;
      for (int64_t byte = 0; byte < kLanes * static_cast<int64_t>(sizeof(T)); byte += kLineBytes) __builtin_prefetch(ahead + byte);
      for (int64_t lane = 0; lane < kLanes; ++lane) sums[lane] += x[k + lane] * Widen(row[k + lane]);
    }
    float rest = 0;
    for (; k < width; ++k) rest += x[k] * Widen(row[k]);
    for (int64_t half = kLanes / 2; half > 0; half /= 2)
      for (int64_t lane = 0; lane < half; ++lane) sums[lane] += sums[lane + half];
    y[n] = sums[0] + rest;
  }
}

inline void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::this_thread::yield();
#endif
}

// Parts are taken by whoever comes first, so the caller never waits for a thread that is busy elsewhere: only for parts that one has begun.
template <typename F>
void InParts(ffi::ThreadPool& pool, int64_t outputs, int64_t width, F part) {
  int64_t threads = outputs * width < kWorthAThread ? 1 : std::max<int64_t>(1, pool.num_threads());
  int64_t step = (outputs + threads - 1) / threads;
  int64_t parts = step ? (outputs + step - 1) / step : 0;
  if (parts < 2) return part(0, outputs);
  struct Progress {
    std::atomic<int64_t> taken{0}, done{0};
  };
  auto progress = std::make_shared<Progress>();
  auto work = [=] {
    for (int64_t p; (p = progress->taken.fetch_add(1)) < parts;) {
      part(p * step, std::min(outputs, (p + 1) * step));
      progress->done.fetch_add(1, std::memory_order_release);
    }
  };
  for (int64_t p = 1; p < parts; ++p) {
    auto helper = work;
    pool.Schedule(std::move(helper));
  }
  work();
  while (progress->done.load(std::memory_order_acquire) < parts) Pause();
}

template <typename T, typename Matrix>
ffi::Error Product(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, Matrix w, ffi::ResultBuffer<ffi::F32> y) {
  if (w.dimensions().size() != 2 || static_cast<int64_t>(x.element_count()) != w.dimensions()[1] ||
      static_cast<int64_t>(y->element_count()) != w.dimensions()[0])
    return ffi::Error::InvalidArgument("a row [in], a matrix [out, in] and a result [out] are expected");
  const float* from = x.typed_data();
  const T* weights = static_cast<const T*>(w.untyped_data());
  float* to = y->typed_data();
  int64_t outputs = w.dimensions()[0], width = w.dimensions()[1];
  InParts(pool, outputs, width, [=](int64_t first, int64_t last) { Rows<T>(from, weights, to, width, first, last); });
  return ffi::Error::Success();
}

ffi::Error Float32(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::F32> w, ffi::ResultBuffer<ffi::F32> y) {
  return Product<float>(pool, x, w, y);
}

ffi::Error Bfloat16(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::BF16> w, ffi::ResultBuffer<ffi::F32> y) {
  return Product<uint16_t>(pool, x, w, y);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(RowTimesFloat32, Float32,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<ffi::Buffer<ffi::F32>>().Arg<ffi::Buffer<ffi::F32>>().Ret<ffi::Buffer<ffi::F32>>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(RowTimesBfloat16, Bfloat16,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<ffi::Buffer<ffi::F32>>().Arg<ffi::Buffer<ffi::BF16>>().Ret<ffi::Buffer<ffi::F32>>());
