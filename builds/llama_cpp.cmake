# Read by llama.cpp's own CMake as soon as its project is named (CMAKE_PROJECT_llama.cpp_INCLUDE).

# The bindings' CMake forces its library of command-line tools, whose compile takes minutes and which
# nothing in the wheel uses. This variable hides the forced one from llama.cpp's folder alone.
set(LLAMA_BUILD_COMMON OFF)

# For who waits for this compile: a fifth less of it. The code that computes is ggml's, whose flags
# stay; the rest of llama.cpp is read with its headers compiled before, and libmtmd's models, of a
# second each, in files of sixteen, as llama.cpp compiles its own models.
if(LLORCH_QUICK)
    function(llorch_quick)
        foreach(target llama mtmd)
            target_compile_options(${target} PRIVATE -O2)
        endforeach()
        target_precompile_headers(llama PRIVATE
            <algorithm> <array> <cmath> <functional> <map> <memory>
            <regex> <set> <sstream> <string> <unordered_map> <vector>)
        set_target_properties(mtmd PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 16)
        get_target_property(folder mtmd SOURCE_DIR)
        get_target_property(files mtmd SOURCES)
        foreach(file ${files})
            if(NOT file MATCHES "^models/")
                set_property(SOURCE ${folder}/${file} TARGET_DIRECTORY mtmd
                    PROPERTY SKIP_UNITY_BUILD_INCLUSION ON)
            endif()
        endforeach()
    endfunction()
    # When all targets are known.
    cmake_language(DEFER DIRECTORY ${CMAKE_SOURCE_DIR} CALL llorch_quick)
endif()
