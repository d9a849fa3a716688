# sparsemla_flags: the compiler options of this project's own targets; never exported.
add_library(sparsemla_flags INTERFACE)
# No contraction: a*b+c rounds twice unless the code says MulAdd, so results do not depend on the compiler's mood.
target_compile_options(sparsemla_flags INTERFACE
    $<$<COMPILE_LANGUAGE:C,CXX>:-Wall;-Wextra;-Wpedantic;-Wshadow;-ffp-contract=off>
    $<$<AND:$<BOOL:${SPARSEMLA_WERROR}>,$<COMPILE_LANGUAGE:C,CXX>>:-Werror>
    # 554: the conversion of a view to a view of const is never called for one that is const already.
    $<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Wall,-Wextra,-ffp-contract=off;-diag-suppress=554>
    $<$<AND:$<BOOL:${SPARSEMLA_WERROR}>,$<COMPILE_LANGUAGE:CUDA>>:-Werror=all-warnings>)

if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
    # GCC 12 misjudges text + std::string temporaries (its bug 105651).
    target_compile_options(sparsemla_flags INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Wno-restrict>)
endif()

if(SPARSEMLA_SANITIZE)
    if(NOT CMAKE_CXX_COMPILER_ID MATCHES "GNU|Clang")
        message(FATAL_ERROR "SPARSEMLA_SANITIZE: need GCC or Clang, got ${CMAKE_CXX_COMPILER_ID}")
    endif()
    target_compile_options(sparsemla_flags INTERFACE
        $<$<COMPILE_LANGUAGE:C,CXX>:-fsanitize=${SPARSEMLA_SANITIZE};-fno-omit-frame-pointer;-fno-sanitize-recover=all>)
    target_link_options(sparsemla_flags INTERFACE -fsanitize=${SPARSEMLA_SANITIZE})
endif()
