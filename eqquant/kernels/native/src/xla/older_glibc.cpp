// Defines symbols that headers of newer systems take from newer libraries, so that a
// library compiled there runs on older systems.
#include <new>

#if defined(__GLIBCXX__) && defined(__GLIBC__)

// Whether the process has no other thread yet: in glibc since 2.32. (It soon has
// others.)
extern "C" __attribute__((visibility("hidden"))) char __libc_single_threaded;
char __libc_single_threaded = 0;

// In libstdc++ since 3.4.29.
namespace std {
[[noreturn]] __attribute__((visibility("hidden"))) void __throw_bad_array_new_length() {
  throw bad_array_new_length();
}
}  // namespace std

#endif
