// Numbered requirements: the same numbers as crates/mamba2-spec/src/rules.rs, which refuses a config before it is compiled.
#pragma once

#define MAMBA2_REQUIRE(rule, condition, text) static_assert(condition, #rule ": " text)
