# SPARSEMLA_PORTABLE: what bin/ holds runs on another machine of this architecture whose C library is as new as this one's.
# Every other shared library lies beside the programs; oneTBB, which brings most of them, has no static form in Debian.
function(sparsemla_bring_along)
    if(NOT SPARSEMLA_PORTABLE)
        return()
    endif()
    foreach(target IN LISTS ARGN)
        get_target_property(configs ${target} IMPORTED_CONFIGURATIONS)
        list(GET configs 0 config)
        get_target_property(file ${target} IMPORTED_LOCATION_${config})
        get_target_property(soname ${target} IMPORTED_SONAME_${config})
        if(soname)
            file(COPY_FILE ${file} ${CMAKE_RUNTIME_OUTPUT_DIRECTORY}/${soname} ONLY_IF_DIFFERENT)
        endif()
    endforeach()
endfunction()

if(SPARSEMLA_PORTABLE)
    set(CMAKE_LIBRARY_OUTPUT_DIRECTORY ${CMAKE_RUNTIME_OUTPUT_DIRECTORY})
    set(CMAKE_SKIP_RPATH ON)
    # Not CMAKE_BUILD_RPATH, which warns of every library that the system has too.
    string(APPEND CMAKE_EXE_LINKER_FLAGS " -s -Wl,-rpath,'$ORIGIN'")
    string(APPEND CMAKE_SHARED_LINKER_FLAGS " -s -Wl,-rpath,'$ORIGIN'")
    file(MAKE_DIRECTORY ${CMAKE_RUNTIME_OUTPUT_DIRECTORY})
    foreach(runtime libstdc++.so.6 libgcc_s.so.1)
        execute_process(COMMAND ${CMAKE_CXX_COMPILER} -print-file-name=${runtime} OUTPUT_VARIABLE file
                        OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
        file(REAL_PATH ${file} file)
        file(COPY_FILE ${file} ${CMAKE_RUNTIME_OUTPUT_DIRECTORY}/${runtime} ONLY_IF_DIFFERENT)
    endforeach()
    foreach(script gpu_check.sh nccl_check.sh soak.sh)
        configure_file(${PROJECT_SOURCE_DIR}/scripts/${script} ${CMAKE_RUNTIME_OUTPUT_DIRECTORY}/${script} COPYONLY)
    endforeach()
    # gpu_check.sh looks for it.
    if(SPARSEMLA_RACECHECK)
        file(TOUCH ${CMAKE_RUNTIME_OUTPUT_DIRECTORY}/RACECHECK)
    else()
        file(REMOVE ${CMAKE_RUNTIME_OUTPUT_DIRECTORY}/RACECHECK)
    endif()
    # What bin/ holds by now, for the journey, with the commit and the golden outputs that gpu_check.sh looks for.
    add_custom_target(portable_archive
        COMMAND sh -c "git -C '${PROJECT_SOURCE_DIR}' describe --always --dirty --abbrev=12 >bin/COMMIT || rm -f bin/COMMIT"
        COMMAND sh -c "rm -rf bin/golden && if [ -d '${PROJECT_SOURCE_DIR}/tests/data/golden' ]; then cp -r '${PROJECT_SOURCE_DIR}/tests/data/golden' bin/; fi"
        COMMAND ${CMAKE_COMMAND} -E tar cJf ${PROJECT_BINARY_DIR}/sparsemla-portable.tar.xz bin
        WORKING_DIRECTORY ${PROJECT_BINARY_DIR} VERBATIM)
endif()
