#include "c10d/base/pages.h"

#include <cstdlib>  // defines __GLIBC__ where it is

#ifdef __GLIBC__
#include <malloc.h>
#endif

namespace dreamcomm {

void give_back_free_pages() {
#ifdef __GLIBC__
  malloc_trim(0);
#endif
}

}  // namespace dreamcomm
