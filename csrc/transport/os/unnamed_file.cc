#include "transport/os/unnamed_file.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <system_error>

#include "core/error.h"
#include "transport/os/nonce.h"

namespace dreamcomm {
namespace {

// From linux/magic.h, which has no RAMFS_MAGIC before 6.1.
constexpr auto kTmpfs = 0x01021994;
constexpr auto kRamfs = 0x858458f6;

std::string reason(int error) {
  const char* const hint = error == EMFILE ? " (raise the limit: ulimit -n)" : "";
  return std::generic_category().message(error) + hint;
}

[[noreturn]] void refuse(const std::string& folder, int error) {
  throw Error(ErrorKind::kSystem,
              concat("cannot make a file in the folder '", folder, "': ", reason(error)));
}

Fd open_folder(const std::string& folder) {
  Fd fd(open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!fd) refuse(folder, errno);
  struct statfs status{};
  if (fstatfs(fd.get(), &status) != 0) refuse(folder, errno);
  const auto type = static_cast<std::uint32_t>(status.f_type);
  check(type != kTmpfs && type != kRamfs, ErrorKind::kSystem, "the folder '", folder,
        "' is memory (tmpfs), so files in it save none: give a folder on a disk");
  return fd;
}

/// A file that never had a name; else its name is removed at once.
Fd open_unnamed(const Fd& folder, const std::string& path) {
  constexpr mode_t kOwn = S_IRUSR | S_IWUSR;
  Fd unnamed(openat(folder.get(), ".", O_TMPFILE | O_RDWR | O_EXCL | O_CLOEXEC, kOwn));
  if (unnamed) return unnamed;
  if (errno != EOPNOTSUPP && errno != EISDIR && errno != ENOENT) refuse(path, errno);
  const std::string name = ".dreamcomm-" + hex(make_nonce());
  Fd named(openat(folder.get(), name.c_str(), O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, kOwn));
  if (!named) refuse(path, errno);
  if (unlinkat(folder.get(), name.c_str(), 0) != 0) refuse(path, errno);
  return named;
}

/// 0 where the system does not tell.
std::size_t free_bytes(const Fd& fd) {
  struct statvfs status{};
  return fstatvfs(fd.get(), &status) == 0 ? status.f_bavail * status.f_frsize : 0;
}

/// 0, or the error that reserving would end with, or has ended with.
int try_to_reserve(const Fd& fd, std::size_t bytes) {
  if (is_too_large_a_file(bytes)) return EFBIG;
  // The system would take all that is free before it notices that it is too little.
  if (const std::size_t free = free_bytes(fd); free != 0 && bytes > free) return ENOSPC;
  int error = EINTR;
  while (error == EINTR) error = posix_fallocate(fd.get(), 0, static_cast<off_t>(bytes));
  return error;
}

/// A full disk is an error here, and not a signal at a later write.
void reserve(const Fd& fd, const std::string& folder, std::size_t bytes) {
  const int error = try_to_reserve(fd, bytes);
  check(error == 0, ErrorKind::kSystem, "cannot reserve ", bytes, " bytes in the folder '", folder,
        "', whose disk has ", free_bytes(fd), " bytes free: ", reason(error),
        error == EFBIG ? " (raise the limit: ulimit -f)" : "");
}

[[noreturn]] void fail_part(const char* what, std::size_t bytes, int error) {
  throw Error(ErrorKind::kSystem, concat(what, " ", bytes, " bytes of a file of offload_folder ",
                                         "failed: ", std::generic_category().message(error)));
}

}  // namespace

bool is_too_large_a_file(std::size_t bytes) {
  rlimit limit{};
  if (getrlimit(RLIMIT_FSIZE, &limit) != 0) return false;
  return limit.rlim_cur != RLIM_INFINITY && bytes > limit.rlim_cur;
}

Fd create_unnamed_file(const std::string& folder, std::size_t bytes) {
  const Fd opened = open_folder(folder);
  Fd fd = open_unnamed(opened, folder);
  reserve(fd, folder, bytes);
  return fd;
}

bool is_unnamed_file(const Fd& fd, std::size_t bytes) {
  struct stat status{};
  if (fstat(fd.get(), &status) != 0 || status.st_size != static_cast<off_t>(bytes)) return false;
  return S_ISREG(status.st_mode) && (fcntl(fd.get(), F_GETFL) & O_ACCMODE) == O_RDWR;
}

void start_writing(const Fd& fd, std::size_t offset, std::size_t bytes) {
  if (sync_file_range(fd.get(), static_cast<off_t>(offset), static_cast<off_t>(bytes),
                      SYNC_FILE_RANGE_WRITE) != 0) {
    fail_part("writing", bytes, errno);
  }
}

void drop_pages(const Fd& fd, std::size_t offset, std::size_t bytes) {
  // Pages that are being written, or have changed, are not freed.
  constexpr unsigned kAll =
      SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER;
  const auto begin = static_cast<off_t>(offset);
  const auto length = static_cast<off_t>(bytes);
  if (sync_file_range(fd.get(), begin, length, kAll) != 0) fail_part("writing", bytes, errno);
  const int error = posix_fadvise(fd.get(), begin, length, POSIX_FADV_DONTNEED);
  if (error != 0) fail_part("dropping", bytes, error);
}

void start_reading(const Fd& fd, std::size_t offset, std::size_t bytes) {
  constexpr std::size_t kWindow = 128
                                  << 10;  // the kernel takes no more at a time than it reads ahead
  for (std::size_t done = 0; done < bytes; done += kWindow) {
    const auto length = static_cast<off_t>(std::min(kWindow, bytes - done));
    const auto begin = static_cast<off_t>(offset + done);
    const int error = posix_fadvise(fd.get(), begin, length, POSIX_FADV_WILLNEED);
    if (error != 0) fail_part("reading", bytes, error);
  }
}

}  // namespace dreamcomm
