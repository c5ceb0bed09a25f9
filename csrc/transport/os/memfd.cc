#include "transport/os/memfd.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

#include "core/error.h"
#include "transport/os/unnamed_file.h"

namespace dreamcomm {
namespace {

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
constexpr int kSealsOfReaders = F_SEAL_WRITE | F_SEAL_FUTURE_WRITE;

const char* remedy(int error) {
  switch (error) {
    case EMFILE:
      return " (raise the limit: ulimit -n)";
    case EFBIG:
      return " (raise the limit: ulimit -f)";
    case EPERM:
    case ENOSYS:
      return " (allow the system call memfd_create, which a sandbox may refuse)";
    default:
      return "";
  }
}

[[noreturn]] void fail(const char* what, std::size_t bytes) {
  const int error = errno;
  const std::string words = concat(what, " of ", bytes, " bytes of shared memory failed: ",
                                   std::generic_category().message(error), remedy(error));
  if (error == EMFILE || error == ENFILE) throw Error(ErrorKind::kSystem, words);
  throw NoSharedMemory(words);
}

int protection_of(bool writable) { return writable ? PROT_READ | PROT_WRITE : PROT_READ; }

}  // namespace

Mapping::Mapping(const Fd& fd, std::size_t bytes, const MappingOptions& options) : bytes_(bytes) {
  void* memory = mmap(nullptr, bytes, protection_of(options.writable), MAP_SHARED, fd.get(), 0);
  if (memory == MAP_FAILED) fail("mapping", bytes);
  data_ = static_cast<std::byte*>(memory);
  // A data loader's worker must not keep the group's memory alive. Best effort:
  // without it only the memory's release is late.
  if (!options.in_children) madvise(memory, bytes, MADV_DONTFORK);
}

void Mapping::allow_writes(bool allowed) const {
  if (mprotect(data_, bytes_, protection_of(allowed)) != 0) fail("protection", bytes_);
}

Mapping::~Mapping() {
  if (data_ != nullptr) munmap(data_, bytes_);
}

Fd create_memfd(const char* label, std::size_t bytes) {
  Fd fd(memfd_create(label, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd) fail("creation", bytes);
  if (is_too_large_a_file(bytes)) {
    errno = EFBIG;
    fail("sizing", bytes);
  }
  if (ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) fail("sizing", bytes);
  if (fcntl(fd.get(), F_ADD_SEALS, kSeals) != 0) fail("sealing", bytes);
  return fd;
}

bool is_sealed_memfd(const Fd& fd, std::size_t bytes) {
  struct stat status{};
  if (fstat(fd.get(), &status) != 0 || status.st_size != static_cast<off_t>(bytes)) return false;
  if ((fcntl(fd.get(), F_GETFL) & O_ACCMODE) != O_RDWR) return false;
  const int seals = fcntl(fd.get(), F_GET_SEALS);  // the system may add some of its own
  return seals >= 0 && (seals & kSeals) == kSeals && (seals & kSealsOfReaders) == 0;
}

}  // namespace dreamcomm
