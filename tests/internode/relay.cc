// The wire between hosts, for kernels without netem: it delays, and may lose, what it carries.
//
// relay DELAY LOSS HOST...: makes an interface "net0" (a TAP) in each network namespace, says so in
// a line, and carries frames between them until its standard input ends. DELAY in seconds, LOSS the
// share of frames that are dropped, from 0 to 1.
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <poll.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <system_error>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;
using Address = std::string;  // of six bytes

constexpr std::size_t header = 10;  // of virtio, before each frame
constexpr std::size_t most = std::size_t{1} << 17;
constexpr unsigned offload = TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO6;  // one frame of 64 KiB

int checked(int result, const std::string& what) {
  if (result < 0) {
    throw std::system_error(errno, std::generic_category(), what);
  }
  return result;
}

// A descriptor of a new interface "net0" in the namespace.
int tap_in(const std::string& host) {
  const int space = checked(open(("/run/netns/" + host).c_str(), O_RDONLY | O_CLOEXEC), host);
  checked(setns(space, CLONE_NEWNET), "cannot enter the network namespace " + host);
  close(space);
  const int tap = checked(open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC), "/dev/net/tun");
  ifreq request{};
  std::strcpy(request.ifr_name, "net0");
  request.ifr_flags = IFF_TAP | IFF_NO_PI | IFF_VNET_HDR;
  checked(ioctl(tap, TUNSETIFF, &request), "cannot make net0 in " + host);
  checked(ioctl(tap, TUNSETOFFLOAD, offload), "net0 takes no long frames");
  return tap;
}

struct Frame {
  std::unique_ptr<char[]> bytes = std::make_unique<char[]>(most);
  std::size_t length = 0;
  Clock::time_point due;
  std::vector<int> to;
};

// A switch that learns which interface has which address.
class Wire {
 public:
  Wire(std::vector<int> taps, double delay, double loss)
      : taps_(std::move(taps)),
        delay_(std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(delay))),
        lost_(loss) {}

  void carry() {
    std::vector<pollfd> looked{{0, POLLIN, 0}};
    for (const int tap : taps_) {
      looked.push_back({tap, POLLIN, 0});
    }
    for (;;) {
      wait(looked);
      char byte = 0;
      if (looked[0].revents != 0 && read(0, &byte, 1) <= 0) {
        return;
      }
      for (std::size_t i = 1; i < looked.size(); ++i) {
        if (looked[i].revents != 0) {
          take(looked[i].fd);
        }
      }
      deliver();
    }
  }

 private:
  // Until something comes or the first frame is due.
  void wait(std::vector<pollfd>& looked) const {
    if (under_way_.empty()) {
      ppoll(looked.data(), looked.size(), nullptr, nullptr);
      return;
    }
    const auto left = std::max(under_way_.front().due - Clock::now(), Clock::duration{});
    const auto nanoseconds = std::chrono::nanoseconds(left).count();
    const timespec limit{nanoseconds / 1'000'000'000, nanoseconds % 1'000'000'000};
    ppoll(looked.data(), looked.size(), &limit, nullptr);
  }

  void take(int tap) {
    Frame frame = fresh();
    const ssize_t length = read(tap, frame.bytes.get(), most);
    if (length < static_cast<ssize_t>(header + 12) || lost_(random_)) {
      spare_.push_back(std::move(frame));
      return;
    }
    const char* const address = frame.bytes.get() + header;
    const Address target(address, 6);
    ports_[Address(address + 6, 6)] = tap;
    const bool everybody = (target[0] & 1) != 0;  // a group's address
    const auto known = everybody ? ports_.end() : ports_.find(target);
    for (const int other : known == ports_.end() ? taps_ : std::vector<int>{known->second}) {
      if (other != tap) {
        frame.to.push_back(other);
      }
    }
    frame.length = static_cast<std::size_t>(length);
    frame.due = Clock::now() + delay_;
    under_way_.push_back(std::move(frame));
  }

  void deliver() {
    const auto now = Clock::now();
    while (!under_way_.empty() && under_way_.front().due <= now) {
      Frame& frame = under_way_.front();
      for (const int tap : frame.to) {
        // It is down, or its queue is full: the frame is lost, as on a wire.
        [[maybe_unused]] const auto written = write(tap, frame.bytes.get(), frame.length);
      }
      spare_.push_back(std::move(frame));
      under_way_.pop_front();
    }
  }

  // Room that was used before is warm.
  Frame fresh() {
    if (spare_.empty()) {
      return {};
    }
    Frame frame = std::move(spare_.back());
    spare_.pop_back();
    frame.to.clear();
    return frame;
  }

  std::vector<int> taps_;
  Clock::duration delay_;
  std::bernoulli_distribution lost_;
  std::mt19937 random_{1};
  std::map<Address, int> ports_;
  std::deque<Frame> under_way_;
  std::vector<Frame> spare_;
};

// A wire does not wait for a processor: it takes one, as the kernel's own would, where that is
// allowed.
void come_first() {
  prctl(PR_SET_TIMERSLACK, 1UL);
  const sched_param priority{1};
  if (sched_setscheduler(0, SCHED_FIFO, &priority) != 0) {
    std::fprintf(stderr, "the relay between hosts waits for a processor as others do\n");
  }
}

}  // namespace

int main(int count, char** words) {
  try {
    std::vector<int> taps;
    for (int i = 3; i < count; ++i) {
      taps.push_back(tap_in(words[i]));
    }
    come_first();
    std::puts("there");
    std::fflush(stdout);
    Wire(std::move(taps), std::atof(words[1]), std::atof(words[2])).carry();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
