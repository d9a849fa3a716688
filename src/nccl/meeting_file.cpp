// Ranks meet by a file: rank 0 writes it under another name and renames it, the others look until it is there and of
// their run.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>

#include "nccl/meeting.h"

namespace sparsemla::detail {

namespace {

struct Content {
    char magic[8] = {'s', 'm', 'l', 'a', 'n', 'i', 'd', '1'};
    std::uint64_t nonce = 0;
    std::int32_t world = 0;
    std::int32_t unused = 0;
    NcclId id{};
    std::uint64_t check = 0;  ///< of what stands before

    std::uint64_t sum() const { return hash_of({reinterpret_cast<const char*>(this), offsetof(Content, check)}); }
};
static_assert(sizeof(Content) == 160 && std::is_trivially_copyable_v<Content>);

[[noreturn]] void fail(const FileMeeting& meeting, const std::string& required, const std::string& received) {
    throw Error(ErrorKind::io, meeting.path, required, received);
}

std::string system_text() { return std::strerror(errno); }

void write_file(const FileMeeting& meeting, const Content& content) {
    const std::string draft = meeting.path + ".new" + std::to_string(getpid());
    unlink(draft.c_str());
    const int file = open(draft.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (file < 0) fail(meeting, "a place where rank 0 can write", system_text());
    const bool written = write(file, &content, sizeof content) == static_cast<ssize_t>(sizeof content);
    const std::string problem = written ? "" : system_text();
    close(file);
    if (written && std::rename(draft.c_str(), meeting.path.c_str()) == 0) return;
    const std::string reason = written ? system_text() : problem;
    unlink(draft.c_str());
    fail(meeting, "a place where rank 0 can write", reason);
}

/// "" and the content, or why there is none.
std::string read_file(const FileMeeting& meeting, Content& content) {
    const int file = open(meeting.path.c_str(), O_RDONLY | O_CLOEXEC);
    if (file < 0) return errno == ENOENT ? "no such file" : system_text();
    char bytes[sizeof content + 1];
    const ssize_t got = read(file, bytes, sizeof bytes);
    const std::string problem = got < 0 ? system_text() : "";
    close(file);
    if (got < 0) return problem;
    if (got != static_cast<ssize_t>(sizeof content))
        return got > static_cast<ssize_t>(sizeof content) ? "a longer file"
                                                          : "a file of " + std::to_string(got) + " bytes";
    const Content blank;
    std::memcpy(&content, bytes, sizeof content);
    if (std::memcmp(content.magic, blank.magic, sizeof blank.magic) != 0 || content.check != content.sum())
        return "a file that no rank 0 has written";
    if (content.nonce != hash_of(meeting.nonce)) return "a file of another run (its nonce is another)";
    return "";
}

}  // namespace

NcclId meet_by_file(const NcclBootstrap& bootstrap, const FileMeeting& meeting,
                    const std::function<NcclId()>& make_id) {
    if (meeting.path.empty() || meeting.nonce.empty())
        throw Error(ErrorKind::invalid_argument, meeting.path.empty() ? "file.path" : "file.nonce",
                    "a name that is the same on all ranks", "nothing");
    Content content{.nonce = hash_of(meeting.nonce), .world = bootstrap.world};
    if (bootstrap.rank == 0) {
        content.id = make_id();
        content.check = content.sum();
        write_file(meeting, content);
        return content.id;
    }
    const Deadline deadline(bootstrap.limit_s);
    for (;;) {
        const std::string problem = read_file(meeting, content);
        if (problem.empty()) break;
        if (deadline.passed()) fail(meeting, "the id that rank 0 writes, " + deadline.text(), problem);
        pause_ms(deadline.milliseconds(20));
    }
    if (content.world != bootstrap.world)
        throw Error(ErrorKind::invalid_argument, "bootstrap.world",
                    std::to_string(content.world) + " ranks, as rank 0 says",
                    std::to_string(bootstrap.world) + " of rank " + std::to_string(bootstrap.rank));
    return content.id;
}

void remove_meeting_file(const FileMeeting& meeting) noexcept { unlink(meeting.path.c_str()); }

}  // namespace sparsemla::detail
