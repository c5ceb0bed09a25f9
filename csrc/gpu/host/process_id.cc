#include "gpu/host/process_id.h"

#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>

namespace dreamcomm::gpu {
namespace {

/// When the process started, in ticks since the machine started.
std::string start_time() {
  std::ifstream file("/proc/self/stat");
  std::string text;
  std::getline(file, text);
  // The name, in brackets, may hold anything; the time is the 20th word after it.
  const std::size_t end = text.rfind(')');
  std::size_t at = end == std::string::npos ? text.size() : end;
  for (int word = 0; word < 20 && at < text.size(); ++word) at = text.find(' ', at + 1);
  return at < text.size() ? text.substr(at, text.find(' ', at + 1) - at) : "";
}

std::string pid_namespace() {
  std::error_code none;
  return std::filesystem::read_symlink("/proc/self/ns/pid", none).string();
}

}  // namespace

Id process_id() {
  const std::uint64_t number = static_cast<std::uint64_t>(getpid());
  const std::uint64_t rest = std::hash<std::string>()(start_time() + pid_namespace());
  Id id{};
  std::memcpy(id.data(), &number, sizeof number);
  std::memcpy(id.data() + sizeof number, &rest, sizeof rest);
  return id;
}

}  // namespace dreamcomm::gpu
