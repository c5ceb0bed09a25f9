#include "cpp/support/local_link.h"

#include <cstring>
#include <utility>

#include "core/error.h"
#include "cpp/support/ranks.h"

namespace dreamcomm::testing {
namespace {

class LocalParcel final : public Parcel {
 public:
  LocalParcel(std::shared_ptr<Post> post, std::shared_ptr<Post::Item> item, int peer)
      : post_(std::move(post)), item_(std::move(item)), peer_(peer) {}

  bool wait() override {
    pause(20);
    std::unique_lock lock(post_->mutex);
    const auto gone = [&] { return post_->closed[static_cast<std::size_t>(peer_)]; };
    post_->changed.wait(lock, [&] { return item_->done || item_->interrupted || gone(); });
    item_->interrupted = false;
    check(item_->done || !gone(), ErrorKind::kPeerLost, "rank ", peer_, " has closed its link");
    return item_->done;
  }
  void interrupt() override {
    const std::scoped_lock lock(post_->mutex);
    item_->interrupted = true;
    post_->changed.notify_all();
  }

 private:
  std::shared_ptr<Post> post_;
  std::shared_ptr<Post::Item> item_;
  int peer_;
};

class LocalLink final : public Link {
 public:
  LocalLink(std::shared_ptr<Post> post, int rank) : post_(std::move(post)), rank_(rank) {}

  std::shared_ptr<Parcel> send(int rank, const Cargo& cargo, std::uint32_t tag) override {
    return put({rank_, rank, tag}, rank, cargo, post_->sends);
  }
  std::shared_ptr<Parcel> receive(int rank, const Cargo& cargo, std::uint32_t tag) override {
    return put({rank, rank_, tag}, rank, cargo, post_->receives);
  }
  void close() override {
    const std::scoped_lock lock(post_->mutex);
    post_->closed[static_cast<std::size_t>(rank_)] = true;
    post_->changed.notify_all();
  }
  std::string describe() const override { return "threads"; }

 private:
  std::shared_ptr<Parcel> put(const Post::Key& key, int peer, const Cargo& cargo,
                              Post::Items& list) {
    pause(20);
    const std::scoped_lock lock(post_->mutex);
    auto item = std::make_shared<Post::Item>(Post::Item{cargo});
    list[key].push_back(item);
    require(!post_->unique || list[key].size() == 1, "two messages under way have one tag");
    match(key);
    return std::make_shared<LocalParcel>(post_, item, peer);
  }

  void match(const Post::Key& key) {
    auto& sends = post_->sends[key];
    auto& receives = post_->receives[key];
    if (!sends.empty() && !receives.empty()) {
      const Cargo& sent = sends.front()->cargo;
      const Cargo& room = receives.front()->cargo;
      require(sent.bytes <= room.bytes, "a message does not fit");
      if (sent.bytes > 0) std::memcpy(room.data(), sent.data(), sent.bytes);
      sends.front()->done = receives.front()->done = true;
      sends.pop_front();
      receives.pop_front();
      post_->changed.notify_all();
    }
    if (sends.empty()) post_->sends.erase(key);
    if (receives.empty()) post_->receives.erase(key);
  }

  std::shared_ptr<Post> post_;
  const int rank_;
};

}  // namespace

std::vector<std::unique_ptr<Link>> make_local_links(int size, bool unique) {
  const auto post = std::make_shared<Post>();
  post->unique = unique;
  post->closed.resize(static_cast<std::size_t>(size));
  std::vector<std::unique_ptr<Link>> links;
  for (int rank = 0; rank < size; ++rank) {
    links.push_back(std::make_unique<LocalLink>(post, rank));
  }
  return links;
}

}  // namespace dreamcomm::testing
