// Attention of one token per request over paged K and V, one thread for each element of the answer. It is slow, and plain to
// read: every stride comes from the caller, in elements of the pool, and sums are kept in double.

// An element of a pool as float; format 0 is fp32, 1 fp16, 2 bf16.
static __device__ float element(const unsigned char *pool, long long index, int format) {
  if (format == 0) return ((const float *)pool)[index];
  unsigned int bits = ((const unsigned short *)pool)[index];
  union { unsigned int word; float value; } result;
  if (format == 2) {
    result.word = bits << 16;
    return result.value;
  }
  unsigned int sign = (bits & 0x8000u) << 16, exponent = (bits >> 10) & 31u, fraction = bits & 1023u;
  if (exponent == 0) {
    float size = (float)fraction * 5.9604644775390625e-08f;  // 2^-24
    return sign ? -size : size;
  }
  result.word = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112u) << 23) | fraction << 13;
  return result.value;
}

extern "C" __global__ void attend(
    const float *queries, const unsigned char *key, const unsigned char *value, const int *table, const int *lengths,
    float *out, double scale, double unit, int format, int threads, int query_heads, int group, int dim, int value_dim,
    int page_tokens, int table_row, int window, int sinks,
    long long key_start, long long key_slot, long long key_head, long long key_token, long long key_dim,
    long long value_start, long long value_slot, long long value_head, long long value_token, long long value_stride) {
  int thread = blockIdx.x * blockDim.x + threadIdx.x;
  if (thread >= threads) return;
  int column = thread % value_dim, row = thread / value_dim;
  int request = row / query_heads, head = row % query_heads / group, length = lengths[request];
  double largest = -1.0 / 0.0, total = 0.0, summed = 0.0;
  for (int token = 0; token < length; ++token) {
    bool seen = window == 0 || length - 1 - token < window || token < sinks;
    if (!seen) continue;
    long long slot = table[request * (long long)table_row + token / page_tokens];
    int entry = token % page_tokens;
    long long key_row = key_start + slot * key_slot + head * key_head + entry * key_token;
    double score = 0.0;
    for (int at = 0; at < dim; ++at)
      score += (double)queries[row * (long long)dim + at] * element(key, key_row + at * key_dim, format);
    score *= scale;
    double higher = score > largest ? score : largest, fade = exp(largest - higher), weight = exp(score - higher);
    long long place = value_start + slot * value_slot + head * value_head + entry * value_token + column * value_stride;
    total = total * fade + weight;
    summed = summed * fade + weight * element(value, place, format);
    largest = higher;
  }
  out[thread] = total == 0.0 ? 0.0f : (float)(summed / total * unit);
}
