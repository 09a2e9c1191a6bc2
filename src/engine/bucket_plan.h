#pragma once
// Which parameter's gradient sits in which bucket, and where. Fixed at start by the parameter's identity, never by execution order, so that
// ranks which run different branches still add like to like. Pure arithmetic: no tensors.
//
// Memory of one bucket: [world_size][slice_numel]. Slice r holds piece r (ShardLayout) of every member, one after another; so what a rank
// reduces is contiguous. A parameter too large for one bucket has buckets of its own, each with a segment of every rank's piece.
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <string>
#include <vector>

#include "unshard/zero/layout.h"

namespace unshard {

struct PlannedParameter {
  int id = -1;  ///< in the store
  std::string name;
  ShardLayout layout;
  c10::ScalarType dtype{};  ///< in which its gradient travels
  bool active = true;       ///< false: frozen at start; kept in buckets apart, whose memory is set aside only when they are used
};

/// Elements [piece_begin, piece_begin + count) of every rank's piece, at `offset` of that rank's slice.
struct BucketMember {
  int parameter = -1;
  std::int64_t piece_begin = 0, count = 0, offset = 0;
};

struct Bucket {
  c10::ScalarType dtype{};
  std::int64_t slice_numel = 0;
  std::vector<BucketMember> members;
  int span = -1;                 ///< accumulators of a span are one contiguous piece of memory
  std::int64_t span_offset = 0;  ///< of this bucket's slice in its span
  std::string label;             ///< "blocks.0.up.weight.. (7)", for messages
};

/// A bucket, or all buckets of one large parameter: their slices joined.
struct Span {
  std::int64_t numel = 0;  ///< elements of one rank's slice
  bool active = true;
};

struct MemberPlace {
  int bucket = -1, member = -1;
};

struct BucketPlan {
  int world_size = 1;
  std::vector<Bucket> buckets;
  std::vector<Span> spans;
  std::vector<std::vector<MemberPlace>> places;  ///< by parameter id; in order of piece_begin; empty: not trained or no elements
  std::vector<std::int64_t> span_offsets;        ///< by parameter id: where its piece starts in its span's slice
  std::vector<ShardLayout> layouts;              ///< by parameter id

  std::int64_t bucket_bytes(int bucket) const;
  std::int64_t largest_bucket_bytes() const;
};

/// \param parameters   trainable ones in registration order; buckets follow the reverse order, in which gradients usually appear.
/// \param bucket_numel most elements in one bucket, over all ranks' slices (a bucket holds at least one element a rank).
BucketPlan plan_buckets(const std::vector<PlannedParameter>& parameters, int world_size, std::int64_t bucket_numel);

}  // namespace unshard
