# Read by llama.cpp's own CMake as soon as its project is named (CMAKE_PROJECT_llama.cpp_INCLUDE).
# The bindings' CMake forces its library of command-line tools, whose compile takes minutes and which
# nothing in the wheel uses. This variable hides the forced one from llama.cpp's folder alone.
set(LLAMA_BUILD_COMMON OFF)
