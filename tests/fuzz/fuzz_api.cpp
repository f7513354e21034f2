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
  const bool is_refusal = !call.refusal.empty() && error.find(call.refusal) != std::string::npos;
  if (!has_fault) return is_thrown && !is_refusal ? "refused legal arguments: " + error : "";
  if (!is_thrown || is_refusal) return "raised no Error of its own";
  return bytes_of(call) == before ? "" : "wrote before its Error: " + error;
}

int fuzz(std::int64_t calls, std::uint64_t seed, const std::string& part) {
  std::vector<Function> functions;
  for (const auto* list : {&kCasts, &kCodes, &kExperts, &kShards, &kProducts})
    functions.insert(functions.end(), list->begin(), list->end());
  std::set<std::string> seen, called;
  for (std::int64_t i = 0; i < calls; ++i) {
    Draws draws(seed + static_cast<std::uint64_t>(i));
    draws.next();
    const Function& function = functions[static_cast<std::size_t>(i) % functions.size()];
    Call call(draws);
    function.draw(call);
    std::string name = function.name;
    const bool has_fault = !call.faults.empty() && !call.one_in(5);
    const auto at = has_fault ? call.below(static_cast<std::int64_t>(call.faults.size())) : 0;
    const Fault* const fault = has_fault ? &call.faults[static_cast<std::size_t>(at)] : nullptr;
    if (fault) name += " with " + fault->name;
    if (name.find(part) == std::string::npos) continue;
    if (fault) fault->commit();
    called.insert(function.name);
    seen.insert(name);
    if (std::getenv("FUZZ_API_NAMES")) std::fprintf(stderr, "%s\n", name.c_str());
    const std::string wrong = wrong_with(call, has_fault);
    if (wrong.empty()) continue;
    std::printf("fuzz_api: %s %s (seed %llu)\n", name.c_str(), wrong.c_str(),
                static_cast<unsigned long long>(seed + static_cast<std::uint64_t>(i)));
    return 1;
  }
  std::printf("fuzz_api: %lld calls of %zu functions with %zu faults, nothing wrong\n",
              static_cast<long long>(calls), called.size(), seen.size());
  return 0;
}

}  // namespace
}  // namespace minifloat::fuzz

int main(int count, char** arguments) {
  return minifloat::fuzz::fuzz(count > 1 ? std::atoll(arguments[1]) : 10000,
                               count > 2 ? std::strtoull(arguments[2], nullptr, 10) : 1,
                               count > 3 ? arguments[3] : "");
}
