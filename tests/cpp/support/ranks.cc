#include "cpp/support/ranks.h"

#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <random>
#include <sstream>
#include <stdexcept>
#include <thread>

#include "transport/bootstrap/connect_shm.h"
#include "transport/local_fabric.h"

namespace dreamcomm::testing {
namespace {

thread_local Heap* heap_of_this_thread = nullptr;

using Body = std::function<void(Communicator&)>;

/// The store of a test's processes: one file per key.
class FileStore final : public Store {
 public:
  explicit FileStore(std::filesystem::path folder) : folder_(std::move(folder)) {}

  void set(const std::string& key, const std::string& value) override {
    const auto path = path_of(key);
    const auto draft = path.string() + ".draft";
    std::ofstream(draft) << value;
    std::filesystem::rename(draft, path);  // appears whole or not at all
  }
  bool has(const std::string& key) override { return std::filesystem::exists(path_of(key)); }
  std::string get(const std::string& key, std::chrono::milliseconds timeout) override {
    const auto deadline = Clock::now() + timeout;
    while (!has(key)) {
      check(Clock::now() < deadline, ErrorKind::kTimeout, "no key ", key);
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    std::ostringstream text;
    text << std::ifstream(path_of(key)).rdbuf();
    return text.str();
  }

 private:
  std::filesystem::path path_of(std::string key) const {
    std::replace(key.begin(), key.end(), '/', '-');
    return folder_ / key;
  }
  std::filesystem::path folder_;
};

class Folder {
 public:
  Folder() : path_((std::filesystem::temp_directory_path() / "dreamcomm-XXXXXX").string()) {
    if (mkdtemp(path_.data()) == nullptr) throw std::runtime_error("mkdtemp failed");
  }
  ~Folder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

std::string failure_of(const std::function<void()>& run) {
  try {
    run();
    return "";
  } catch (const std::exception& error) {
    return *error.what() == '\0' ? "an exception without text" : error.what();
  }
}

std::vector<std::string> run_threads(const Setup& setup, const Body& body) {
  LocalOptions options{setup.page_bytes, setup.message_bytes, setup.start, {}};
  for (int rank = 0; setup.heap_bytes > 0 && rank < setup.size; ++rank) {
    options.heaps.push_back(Heap::make(setup.heap_bytes));
  }
  auto fabrics = make_local(setup.size, options);
  std::vector<std::string> failures(fabrics.size());
  std::vector<std::thread> threads;
  for (std::size_t rank = 0; rank < fabrics.size(); ++rank) {
    threads.emplace_back([&, rank, fabric = std::move(fabrics[rank])]() mutable {
      if (!options.heaps.empty()) heap_of_this_thread = options.heaps[rank].get();
      failures[rank] = failure_of([&] {
        Communicator comm(std::move(fabric), setup.comm);
        body(comm);
      });
    });
  }
  for (auto& thread : threads) thread.join();
  return failures;
}

void be_rank(const Setup& setup, const Body& body, int rank, const std::string& folder) {
  FileStore store(folder);
  ShmOptions options;
  options.page_bytes = setup.page_bytes;
  options.message_bytes = setup.message_bytes;
  options.timeout = std::chrono::seconds(60);
  if (setup.heap_bytes > 0) options.heap = Heap::make(setup.heap_bytes);
  heap_of_this_thread = options.heap.get();
  ShmResult result = connect_shm(store, rank, setup.size, options);
  require(result.fabric != nullptr, result.reason);
  Communicator comm(std::move(result.fabric), setup.comm);
  body(comm);
}

std::vector<std::string> run_processes(const Setup& setup, const Body& body) {
  const Folder folder;
  std::vector<pid_t> children;
  for (int rank = 0; rank < setup.size; ++rank) {
    const pid_t child = fork();
    if (child == 0) {
      const std::string failure = failure_of([&] { be_rank(setup, body, rank, folder.path()); });
      std::ofstream(folder.path() + "/failure-" + std::to_string(rank)) << failure;
      _exit(failure.empty() ? 0 : 1);
    }
    children.push_back(child);
  }
  std::vector<std::string> failures;
  for (std::size_t rank = 0; rank < children.size(); ++rank) {
    int status = 0;
    waitpid(children[rank], &status, 0);
    std::ostringstream text;
    text << std::ifstream(folder.path() + "/failure-" + std::to_string(rank)).rdbuf();
    std::string failure = text.str();
    if (failure.empty() && status != 0) failure = "the process ended early";
    failures.push_back(failure);
  }
  return failures;
}

}  // namespace

std::ostream& operator<<(std::ostream& out, const Setup& s) {
  return out << (s.transport == Transport::kLocal ? "local" : "shm") << ", " << s.size
             << " ranks, pages of " << s.page_bytes << ", algorithm " << s.comm.algorithm
             << ", heap of " << s.heap_bytes;
}

void run_ranks(const Setup& setup, const Body& body, const std::vector<int>& may_die) {
  const auto failures =
      setup.transport == Transport::kLocal ? run_threads(setup, body) : run_processes(setup, body);
  std::ostringstream text;
  for (std::size_t rank = 0; rank < failures.size(); ++rank) {
    const bool excused =
        std::find(may_die.begin(), may_die.end(), static_cast<int>(rank)) != may_die.end();
    if (!failures[rank].empty() && !excused) {
      text << "\n  rank " << rank << ": " << failures[rank];
    }
  }
  if (!text.str().empty()) throw std::runtime_error(text.str());
}

std::vector<Transport> transports() {
#if defined(__SANITIZE_THREAD__)
  return {Transport::kLocal};
#else
  return {Transport::kLocal, Transport::kShm};
#endif
}

Heap* own_heap() { return heap_of_this_thread; }

std::size_t tiny_page(int size) { return (static_cast<std::size_t>(size) + 4) * 256; }

void pause(int per_mille) {
  thread_local std::mt19937 random(std::random_device{}());
  if (static_cast<int>(random() % 1000) >= per_mille) return;
  std::this_thread::sleep_for(std::chrono::microseconds(random() % 400));
}

void require(bool condition, const std::string& text) {
  if (!condition) throw std::runtime_error(text);
}

}  // namespace dreamcomm::testing
