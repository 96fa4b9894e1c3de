// How parameters are cut into what each replica steps.

#include "engine/gradients/shares.h"

#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

namespace pd2 {
namespace {

using Bytes = std::int64_t;
using Numels = std::vector<std::int64_t>;

constexpr std::int64_t kLine = 512;  // elements on whose multiples a parameter may be cut
constexpr Bytes kOneBucket = std::numeric_limits<Bytes>::max();
constexpr int kMostRanks = 5;

std::int64_t sum(const Numels& of) { return std::accumulate(of.begin(), of.end(), Bytes{0}); }

// Gradients of parameters of so many elements: float32, and then float64.
class Parameters {
 public:
  Parameters(const std::vector<Numels>& numels, Bytes bucket_bytes) : numels(numels) {
    for (const Numels& of_dtype : numels) {
      const at::ScalarType dtype = gradients.empty() ? at::kFloat : at::kDouble;
      std::vector<at::Tensor> parameters;
      std::vector<std::string> names;
      for (const std::int64_t numel : of_dtype) {
        parameters.push_back(at::ones({numel}, dtype));
        names.push_back(std::to_string(names.size()));
      }
      packings_.push_back(std::make_unique<FlatPacking>(parameters));
      const FlatPacking& packing = *packings_.back();
      gradients.push_back(std::make_unique<GradAccumulator>(
          packing, names,
          std::vector{packing.allocate(dtype, GradAccumulator::num_flags(packing, true))}));
    }
    buckets = GradientBuckets::cut(gradients, bucket_bytes);
  }

  MayCut all_may_be_cut() const {
    MayCut all;
    for (const Numels& of_dtype : numels) {
      all.emplace_back(of_dtype.size(), true);
    }
    return all;
  }
  Bytes element(std::size_t dtype) const { return dtype == 0 ? 4 : 8; }
  Bytes bytes() const {
    Bytes all = 0;
    for (std::size_t dtype = 0; dtype < numels.size(); ++dtype) {
      all += sum(numels[dtype]) * element(dtype);
    }
    return all;
  }

  std::vector<Numels> numels;
  std::vector<std::unique_ptr<GradAccumulator>> gradients;
  std::vector<GradientBuckets::Bucket> buckets;

 private:
  std::vector<std::unique_ptr<FlatPacking>> packings_;
};

// What a rank has of a parameter, in its elements.
struct Piece {
  int rank;
  std::int64_t begin, end;
};

// By dtype and parameter, in the order of the elements. Expects what holds for any list: every
// element is in one share, and shares are of one bucket, in the order of its ranks.
std::vector<std::vector<std::vector<Piece>>> pieces_of(const Parameters& of,
                                                       const std::vector<Share>& shares,
                                                       int num_ranks) {
  std::vector<std::vector<std::vector<Piece>>> pieces;
  for (const Numels& numels : of.numels) {
    pieces.emplace_back(numels.size());
  }
  const Share* before = nullptr;
  for (const Share& share : shares) {
    const GradientBuckets::Bucket& bucket = of.buckets.at(share.bucket);
    EXPECT_EQ(share.dtype, bucket.dtype);
    EXPECT_TRUE(0 <= share.rank && share.rank < num_ranks) << share.rank;
    EXPECT_LE(share.begin, share.end);  // of an empty parameter alone: none
    EXPECT_LE(share.end, of.gradients[share.dtype]->packing().numel()) << "no flags";
    if (before != nullptr && before->bucket == share.bucket) {
      EXPECT_LT(before->rank, share.rank);
      EXPECT_EQ(before->end, share.begin);
    } else {
      EXPECT_EQ(share.begin, bucket.begin);
      EXPECT_TRUE(before == nullptr || before->bucket < share.bucket);
    }
    before = &share;
    const auto& views = of.gradients[share.dtype]->packing().views();
    for (std::size_t i = 0; i < views.size(); ++i) {
      const std::int64_t begin = std::max(share.begin - views[i].offset, std::int64_t{0});
      const std::int64_t end = std::min(share.end - views[i].offset, views[i].numel);
      if (views[i].numel > 0) {
        EXPECT_EQ(begin < end, share.first <= i && i < share.last) << "parameter " << i;
      }
      if (begin < end) {
        pieces[share.dtype][i].push_back({share.rank, begin, end});
      }
    }
  }
  for (std::size_t dtype = 0; dtype < of.numels.size(); ++dtype) {
    for (std::size_t i = 0; i < of.numels[dtype].size(); ++i) {
      std::int64_t next = 0;
      for (const Piece& piece : pieces[dtype][i]) {
        EXPECT_EQ(piece.begin, next) << "parameter " << i;
        next = piece.end;
      }
      EXPECT_EQ(next, of.numels[dtype][i]) << "parameter " << i;
    }
  }
  return pieces;
}

// The bytes of each rank.
Numels loads_of(const Parameters& of, const std::vector<std::vector<std::vector<Piece>>>& pieces,
                int num_ranks) {
  Numels loads(num_ranks, 0);
  for (std::size_t dtype = 0; dtype < pieces.size(); ++dtype) {
    for (const std::vector<Piece>& of_parameter : pieces[dtype]) {
      for (const Piece& piece : of_parameter) {
        loads.at(piece.rank) += (piece.end - piece.begin) * of.element(dtype);
      }
    }
  }
  return loads;
}

// Expects that only what may be cut is, if it is larger than a sixteenth of a share, on its lines;
// and that no rank has more than its part and the largest of what is whole: then all can have less.
Numels check(const std::vector<Numels>& numels, Bytes bucket_bytes, int num_ranks,
             const MayCut* may_cut = nullptr) {
  const Parameters of(numels, bucket_bytes);
  const MayCut all = of.all_may_be_cut();
  const MayCut& cuts = may_cut != nullptr ? *may_cut : all;
  const std::vector<Share> shares = share_out(of.buckets, of.gradients, num_ranks, cuts);
  const auto pieces = pieces_of(of, shares, num_ranks);
  const double share = static_cast<double>(of.bytes()) / num_ranks;
  double largest = 0;
  for (std::size_t dtype = 0; dtype < numels.size(); ++dtype) {
    const Bytes element = of.element(dtype);
    for (std::size_t i = 0; i < numels[dtype].size(); ++i) {
      const bool may = !cuts.empty() && cuts[dtype][i];
      const auto bytes = static_cast<double>(numels[dtype][i] * element);
      const double line = static_cast<double>(kLine * element);
      if (pieces[dtype][i].size() > 1) {
        EXPECT_TRUE(may) << "parameter " << i;
        EXPECT_GT(bytes, line);
        EXPECT_GT(bytes + line, share / 16) << "lines are whole";
      }
      for (const Piece& piece : pieces[dtype][i]) {
        EXPECT_EQ(piece.begin % kLine, 0) << "parameter " << i;
      }
      largest = std::max(largest, may ? std::min(bytes, std::max(share / 16, line)) : bytes);
    }
  }
  const Numels loads = loads_of(of, pieces, num_ranks);
  EXPECT_EQ(sum(loads), of.bytes());
  EXPECT_LE(static_cast<double>(std::ranges::max(loads)), share + largest);
  return loads;
}

constexpr Bytes kBucketBytes[] = {1, 10'000, 1'000'000, kOneBucket};

TEST(Shares, OfNothingThereAreNone) {
  for (int num_ranks = 1; num_ranks <= kMostRanks; ++num_ranks) {
    EXPECT_TRUE(share_out({}, {}, num_ranks, {}).empty());
  }
}

// The last rank has what the others leave.
TEST(Shares, OneHugeMatrixIsCutAndNoRankHasASixteenthMore) {
  constexpr std::int64_t kNumel = 1'000'003;
  for (int num_ranks = 1; num_ranks <= kMostRanks; ++num_ranks) {
    const Numels loads = check({{kNumel}}, kOneBucket, num_ranks);
    const double share = 4.0 * kNumel / num_ranks;
    EXPECT_LE(static_cast<double>(std::ranges::max(loads)), share * 17 / 16);
    EXPECT_GE(static_cast<double>(std::ranges::min(loads)), share * (17 - num_ranks) / 16);
  }
}

TEST(Shares, WhatMayNotBeCutIsWhole) {
  for (const MayCut& none : {MayCut{}, MayCut{{false, false}}}) {
    Numels loads = check({{1'000'000, 1'000}}, kOneBucket, 3, &none);
    std::ranges::sort(loads);
    EXPECT_EQ(loads, (Numels{0, 4'000, 4'000'000}));
  }
  const MayCut first{{true, false}};
  const Numels loads = check({{800'000, 200'000}}, kOneBucket, 2, &first);
  EXPECT_NEAR(static_cast<double>(loads[0]), 2e6, 2e6 / 16);
}

TEST(Shares, ManySmallOnesStayWhole) {
  const Numels small(1'000, 100);
  for (const Bytes bucket_bytes : kBucketBytes) {
    for (int num_ranks = 1; num_ranks <= kMostRanks; ++num_ranks) {
      const Parameters of({small}, bucket_bytes);
      const auto shares = share_out(of.buckets, of.gradients, num_ranks, of.all_may_be_cut());
      const auto pieces = pieces_of(of, shares, num_ranks);
      EXPECT_TRUE(std::ranges::all_of(pieces.front(), [](const std::vector<Piece>& of_parameter) {
        return of_parameter.size() == 1;
      }));
      const Numels loads = check({small}, bucket_bytes, num_ranks);
      EXPECT_LE(std::ranges::max(loads) - std::ranges::min(loads), num_ranks * 400);
    }
  }
}

// An embedding, blocks of matrices, biases and norms.
TEST(Shares, OfALanguageModelAreEqualButForASixteenth) {
  Numels numels{50'000 * 16};
  for (int block = 0; block < 6; ++block) {
    numels.insert(numels.end(), {16, 16, 3 * 256, 48, 256, 16, 16, 4 * 256, 64, 4 * 256, 16});
  }
  for (const Bytes bucket_bytes : kBucketBytes) {
    for (int num_ranks = 1; num_ranks <= kMostRanks; ++num_ranks) {
      const Numels loads = check({numels}, bucket_bytes, num_ranks);
      const double share = 4.0 * static_cast<double>(sum(numels)) / num_ranks;
      EXPECT_LE(static_cast<double>(std::ranges::max(loads)), share * 17 / 16);
    }
  }
}

TEST(Shares, OfAnyParametersHoldEveryElementOnce) {
  std::mt19937 draw(7);
  const auto below = [&](std::int64_t most) {
    return static_cast<std::int64_t>(draw() % static_cast<std::uint64_t>(most));
  };
  for (int round = 0; round < 200; ++round) {
    std::vector<Numels> numels(1 + below(2));
    MayCut may_cut;
    for (Numels& of_dtype : numels) {
      for (std::int64_t count = 1 + below(12); count > 0; --count) {
        const std::int64_t kind = below(4);
        of_dtype.push_back(kind == 0   ? below(3)
                           : kind == 1 ? below(kLine)
                           : kind == 2 ? kLine * below(20)
                                       : below(60'000));
      }
      std::vector<bool>& cuts = may_cut.emplace_back();
      for (std::size_t i = 0; i < of_dtype.size(); ++i) {
        cuts.push_back(below(3) > 0);
      }
    }
    const auto num_ranks = static_cast<int>(1 + below(kMostRanks));
    check(numels, kBucketBytes[round % 4], num_ranks, &may_cut);
    if (::testing::Test::HasFailure()) {
      FAIL() << "round " << round;
    }
  }
}

// The least that the rank with the most of so many can have, of pieces in their order.
Bytes least_of_most(const Numels& pieces, int num_ranks) {
  std::vector<Bytes> least(pieces.size() + 1, kOneBucket);  // by how many pieces are taken
  least[0] = 0;
  for (int rank = 0; rank < num_ranks; ++rank) {
    std::vector<Bytes> next = least;  // this one takes nothing
    for (std::size_t first = 0; first < pieces.size(); ++first) {
      Bytes taken = 0;
      for (std::size_t last = first + 1; last <= pieces.size(); ++last) {
        taken += pieces[last - 1];
        next[last] = std::min(next[last], std::max(least[first], taken));
      }
    }
    least = next;
  }
  return least.back();
}

TEST(Shares, NoRankOfOneBucketHasMoreThanItMust) {
  std::mt19937 draw(11);
  for (int round = 0; round < 100; ++round) {
    Numels numels;
    for (auto count = 1 + draw() % 10; count > 0; --count) {
      numels.push_back(static_cast<std::int64_t>(1 + draw() % 5'000));
    }
    for (int num_ranks = 1; num_ranks <= kMostRanks; ++num_ranks) {
      // A sixteenth of a share, in whole lines, and at least one.
      const std::int64_t most =
          std::max(4 * sum(numels) / num_ranks / 16 / 4 / kLine, std::int64_t{1}) * kLine;
      Numels wholes, cut;
      for (const std::int64_t numel : numels) {
        wholes.push_back(4 * numel);
        for (std::int64_t begin = 0; begin < numel; begin += most) {
          cut.push_back(4 * std::min(most, numel - begin));
        }
      }
      const MayCut none;
      EXPECT_EQ(std::ranges::max(check({numels}, kOneBucket, num_ranks, &none)),
                least_of_most(wholes, num_ranks));
      EXPECT_EQ(std::ranges::max(check({numels}, kOneBucket, num_ranks)),
                least_of_most(cut, num_ranks));
    }
  }
}

}  // namespace
}  // namespace pd2
