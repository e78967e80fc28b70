# Read by ggml's own CMake as soon as its project is named (CMAKE_PROJECT_ggml_INCLUDE).
add_compile_options(
    "$<$<COMPILE_LANGUAGE:CXX>:SHELL:-include ${CMAKE_CURRENT_LIST_DIR}/tile_config.h>")
