#include "cpp/c10d/support/group_ranks.h"

#include <cstddef>
#include <cstdio>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <vector>

namespace dreamcomm::testing {
namespace {

PythonCallbacks callbacks() {
  return {.make_inner = [](const StorePtr&, int, int, const c10::intrusive_ptr<DreamOptions>&,
                           const std::string& device_type) -> Fallback::Inner {
            throw std::runtime_error("these tests have no backend of torch's for " + device_type);
          },
          .call_site = [] { return std::string(); },
          .main_thread_site = [] { return std::string(); },
          .warn = [](const std::string& text) { std::fprintf(stderr, "%s\n", text.c_str()); },
          .report = [](const std::shared_ptr<Recorder>&, const std::string&) {},
          .register_exit = [](const c10::intrusive_ptr<DreamBackend>&) { return nullptr; }};
}

c10::intrusive_ptr<DreamOptions> options_of(const GroupSetup& setup) {
  auto options = c10::make_intrusive<DreamOptions>(std::chrono::seconds(30));
  options->group_name = "threads";  // not the default group, which a process has once
  options->costs = "fixed";
  options->heap_bytes = std::size_t{1} << 20;
  if (setup.options) setup.options(*options);
  return options;
}

void be_rank(const GroupSetup& setup, const StorePtr& store, int rank,
             const std::function<void(GroupRank&)>& body) {
  auto backend = DreamBackend::create(store, rank, setup.size, options_of(setup), callbacks());
  auto group = c10::make_intrusive<c10d::ProcessGroup>(store, rank, setup.size);
  group->setBackend(c10::DeviceType::CPU, c10d::ProcessGroup::CUSTOM, backend);
  group->setDefaultBackend(c10d::ProcessGroup::CUSTOM);
  group->setGroupName("threads");
  GroupRank self{rank, setup.size, std::move(backend), std::move(group)};
  try {
    body(self);
  } catch (...) {
    self.backend->abort();
    throw;
  }
  self.backend->shutdown();
}

}  // namespace

void run_group(const GroupSetup& setup, const std::function<void(GroupRank&)>& body) {
  const StorePtr store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::string> failures(static_cast<std::size_t>(setup.size));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < setup.size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        be_rank(setup, store, rank, body);
      } catch (const std::exception& error) {
        failures[static_cast<std::size_t>(rank)] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::string text;
  for (std::size_t rank = 0; rank < failures.size(); ++rank) {
    if (!failures[rank].empty()) text += concat("\n  rank ", rank, ": ", failures[rank]);
  }
  if (!text.empty()) throw std::runtime_error(text);
}

}  // namespace dreamcomm::testing
