#pragma once

inline int volatile_tid_x() { return static_cast<int>(threadIdx.x); }

template <typename F>
void one_thread_if(bool wanted, F&& f) {
  if (wanted && threadIdx.x % 32 == 0) f();
}
