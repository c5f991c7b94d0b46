// Pages of memory that nothing may touch.
#pragma once

#ifdef _WIN32
#define NOMINMAX
#include <windows.h>
#else
#include <sys/mman.h>
#include <unistd.h>
#endif

#include <cstddef>

namespace eqquant {
namespace {

#ifdef _WIN32

size_t page_size() {
  SYSTEM_INFO info;
  GetSystemInfo(&info);
  return info.dwPageSize;
}

char* guarded_pages(size_t size) {
  return static_cast<char*>(VirtualAlloc(nullptr, size, MEM_RESERVE, PAGE_NOACCESS));
}

bool open_pages(char* start, size_t size) {
  return VirtualAlloc(start, size, MEM_COMMIT, PAGE_READWRITE) != nullptr;
}

void free_pages(char* start, size_t) { VirtualFree(start, 0, MEM_RELEASE); }

#else

size_t page_size() { return static_cast<size_t>(sysconf(_SC_PAGESIZE)); }

char* guarded_pages(size_t size) {
  return static_cast<char*>(
      mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
}

bool open_pages(char* start, size_t size) {
  return mprotect(start, size, PROT_READ | PROT_WRITE) == 0;
}

void free_pages(char* start, size_t size) { munmap(start, size); }

#endif

}  // namespace
}  // namespace eqquant
