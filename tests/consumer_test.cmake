# Installs the build into a scratch prefix, configures the consumer project against it, builds it and runs its programs.
cmake_minimum_required(VERSION 3.25)

function(run)
    execute_process(COMMAND ${ARGN} RESULT_VARIABLE failed OUTPUT_VARIABLE output ERROR_VARIABLE output)
    if(failed)
        list(JOIN ARGN " " command)
        message(FATAL_ERROR "failed: ${command}\n${output}")
    endif()
    set(output "${output}" PARENT_SCOPE)
endfunction()

file(REMOVE_RECURSE ${WORK_DIR})
run(${CMAKE_COMMAND} --install ${BUILD_DIR} --config "${CONFIG}" --prefix ${WORK_DIR}/prefix)

set(flags)
if(SANITIZE)
    set(flags -DCMAKE_C_FLAGS=-fsanitize=${SANITIZE} -DCMAKE_CXX_FLAGS=-fsanitize=${SANITIZE})
endif()
run(${CMAKE_COMMAND} -S ${CONSUMER_DIR} -B ${WORK_DIR}/build -G ${GENERATOR} -DCMAKE_BUILD_TYPE=${CONFIG}
    -DCMAKE_PREFIX_PATH=${WORK_DIR}/prefix -DCMAKE_C_COMPILER=${C_COMPILER} -DCMAKE_CXX_COMPILER=${CXX_COMPILER} ${flags})
run(${CMAKE_COMMAND} --build ${WORK_DIR}/build --config "${CONFIG}")

foreach(program consumer_c consumer_cpp)
    run(${WORK_DIR}/build/${program})
    if(NOT output MATCHES "sparsemla ${VERSION}: 0.5")
        message(FATAL_ERROR "${program}: need 'sparsemla ${VERSION}: 0.5', got '${output}'")
    endif()
endforeach()

# A version that nobody can serve must be refused by the package's version file.
file(WRITE ${WORK_DIR}/future/CMakeLists.txt
     "cmake_minimum_required(VERSION 3.25)\nproject(future CXX)\nfind_package(sparsemla 99 CONFIG REQUIRED)\n")
execute_process(COMMAND ${CMAKE_COMMAND} -S ${WORK_DIR}/future -B ${WORK_DIR}/future/build -G ${GENERATOR}
                        -DCMAKE_PREFIX_PATH=${WORK_DIR}/prefix -DCMAKE_CXX_COMPILER=${CXX_COMPILER}
                RESULT_VARIABLE failed OUTPUT_QUIET ERROR_VARIABLE output)
if(NOT failed OR NOT output MATCHES "99")
    message(FATAL_ERROR "find_package(sparsemla 99): need a refusal, got '${output}'")
endif()
