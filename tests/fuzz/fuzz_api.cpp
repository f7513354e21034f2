// Hostile calls of every function of the C++ API: fuzz_api [calls] [seed] [part of a name]
//
// A call is drawn with legal arguments, then given one fault, or none. A call without a fault must
// return, one with a fault must throw Error and leave each byte of its memory as it was. A build
// with AddressSanitizer sees every access outside of the memory.
#include <cstdio>
#include <cstdlib>
#include <set>

#include "fuzz/call.h"
#include "minifloat/error.h"

namespace minifloat::fuzz {
namespace {

std::vector<std::vector<std::uint8_t>> bytes_of(const Call& call) {
  std::vector<std::vector<std::uint8_t>> bytes;
  for (const Block& block : call.blocks)
    bytes.emplace_back(block.begin(), block.begin() + block.size());
  return bytes;
}

// Runs a call. Returns what is wrong; "": nothing.
std::string wrong_with(Call& call, bool has_fault) {
  const auto before = bytes_of(call);
  std::string error;
  bool is_thrown = false;
  try {
    call.run();
  } catch (const Error& thrown) {
    is_thrown = true;
    error = thrown.what();
  }
  for (const Block& block : call.blocks)
    if (!block.guards_hold()) return "wrote outside of its memory";
  if (!has_fault) return is_thrown ? "refused legal arguments: " + error : "";
  if (!is_thrown) return "raised no Error";
  return bytes_of(call) == before ? "" : "wrote before its Error: " + error;
}

int fuzz(std::int64_t calls, std::uint64_t seed, const std::string& part) {
  std::vector<MakeCall> makers;
  for (const auto* list : {&kCastCalls, &kCodeCalls, &kExpertCalls, &kShardCalls})
    makers.insert(makers.end(), list->begin(), list->end());
  std::set<std::string> seen, functions;
  for (std::int64_t i = 0; i < calls; ++i) {
    Draws draw(seed + static_cast<std::uint64_t>(i));
    draw.next();
    Call call = makers[static_cast<std::size_t>(i) % makers.size()](draw);
    std::string name = call.name;
    const bool has_fault = !call.faults.empty() && !draw.one_in(5);
    if (has_fault) {
      const auto at =
          static_cast<std::size_t>(draw.below(static_cast<std::int64_t>(call.faults.size())));
      name += " with " + call.faults[at].name;
      if (name.find(part) == std::string::npos) continue;
      call.faults[at].commit();
    } else if (name.find(part) == std::string::npos) {
      continue;
    }
    functions.insert(call.name);
    seen.insert(name);
    if (std::getenv("FUZZ_API_NAMES")) std::fprintf(stderr, "%s\n", name.c_str());
    const std::string wrong = wrong_with(call, has_fault || !call.is_legal);
    if (wrong.empty()) continue;
    std::printf("fuzz_api: %s %s (seed %llu)\n", name.c_str(), wrong.c_str(),
                static_cast<unsigned long long>(seed + static_cast<std::uint64_t>(i)));
    return 1;
  }
  std::printf("fuzz_api: %lld calls of %zu functions with %zu faults, nothing wrong\n",
              static_cast<long long>(calls), functions.size(), seen.size());
  return 0;
}

}  // namespace
}  // namespace minifloat::fuzz

int main(int count, char** arguments) {
  return minifloat::fuzz::fuzz(count > 1 ? std::atoll(arguments[1]) : 10000,
                               count > 2 ? std::strtoull(arguments[2], nullptr, 10) : 1,
                               count > 3 ? arguments[3] : "");
}
