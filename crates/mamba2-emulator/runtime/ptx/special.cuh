#pragma once

inline int volatile_tid_x() { return static_cast<int>(threadIdx.x); }
