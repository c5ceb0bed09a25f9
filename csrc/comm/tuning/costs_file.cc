#include "comm/tuning/costs_file.h"

#include <unistd.h>

#include <cctype>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <system_error>

#include "core/cpus.h"
#include "core/error.h"
#include "kernels/reduce.h"

namespace dreamcomm {
namespace {

namespace fs = std::filesystem;

fs::path cache_folder() {
  if (const char* cache = std::getenv("XDG_CACHE_HOME"); cache != nullptr && *cache != '\0') {
    return fs::path(cache) / "dreamcomm";
  }
  if (const char* home = std::getenv("HOME"); home != nullptr && *home != '\0') {
    return fs::path(home) / ".cache" / "dreamcomm";
  }
  return {};
}

std::string processor() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);) {
    if (line.rfind("model name", 0) == 0) return line.substr(line.find(':') + 1);
  }
  return "unknown";
}

/// Replaces all but alphanumeric characters by single dashes.
std::string plain(const std::string& text) {
  std::string result;
  for (const char c : text) {
    if (std::isalnum(static_cast<unsigned char>(c)) != 0) {
      result += c;
    } else if (!result.empty() && result.back() != '-') {
      result += '-';
    }
  }
  return result;
}

}  // namespace

std::string costs_path(int size, std::size_t page_bytes, bool heaps) {
  const fs::path folder = cache_folder();
  if (folder.empty()) return "";
  const std::string what = concat(processor(), ' ', instruction_set(), ' ', usable_cpus(), "cpus ",
                                  size, "ranks ", page_bytes, heaps ? "" : " no heap");
  return folder / concat("costs-", plain(what), ".txt");
}

std::optional<Costs> load_costs(const std::string& path) {
  std::ifstream file(path);
  if (!file) return std::nullopt;
  std::ostringstream text;
  text << file.rdbuf();
  return from_text(text.str());
}

bool save_costs(const std::string& path, const Costs& costs) {
  if (path.empty()) return false;
  std::error_code error;
  fs::create_directories(fs::path(path).parent_path(), error);
  if (error) return false;
  const std::string draft = concat(path, '.', getpid());
  {
    std::ofstream file(draft);
    file << to_text(costs);
    if (file.flush()) fs::rename(draft, path, error);
    if (file && !error) return true;
  }
  fs::remove(draft, error);
  return false;
}

}  // namespace dreamcomm
