// Copies are done at once: a missing wait shows on a GPU only.
#pragma once

inline unsigned smem_address(const void* p) {
  const long offset = static_cast<const unsigned char*>(p) - emulator::own_shared();
  if (offset < 0 || offset >= emulator::SHARED_BYTES) emulator::fault("the address of something that is not in shared memory");
  return static_cast<unsigned>(offset);
}

inline void cp_async_cg_16(void* smem, const void* global, int bytes) {
  smem_address(smem);
  if (reinterpret_cast<std::uintptr_t>(smem) % 16 || (bytes && reinterpret_cast<std::uintptr_t>(global) % 16))
    emulator::fault("cp.async of 16 bytes is not aligned");
  std::memset(smem, 0, 16);
  if (bytes) std::memcpy(smem, global, static_cast<std::size_t>(bytes));
}
inline void cp_async_ca_4(void* smem, const void* global) { std::memcpy(smem, global, 4); }
inline void cp_async_commit_group() {}
template <int PENDING>
inline void cp_async_wait_group() {}
