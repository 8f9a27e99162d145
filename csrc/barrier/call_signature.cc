#include "csrc/barrier/call_signature.h"

#include <algorithm>
#include <map>
#include <utility>

namespace jaxmp {
namespace {

// FNV-1a: the same in every process, which std::hash need not be.
uint64_t Hash(const std::string& text) {
  uint64_t hash = 0xCBF29CE484222325u;
  for (unsigned char c : text) hash = (hash ^ c) * 0x100000001B3u;
  return hash;
}

std::map<std::string, std::string> FieldsOf(const std::string& fields) {
  std::map<std::string, std::string> result;
  for (size_t begin = 0; begin < fields.size();) {
    const size_t end = std::min(fields.find('\n', begin), fields.size());
    const std::string line = fields.substr(begin, end - begin);
    const size_t equals = line.find('=');
    if (equals != std::string::npos) result[line.substr(0, equals)] = line.substr(equals + 1);
    begin = end + 1;
  }
  return result;
}

}  // namespace

StatusOr<std::shared_ptr<const CallSignature>> Prepare(CallSignature signature) {
  const size_t size = signature.devices.size();
  if (signature.processes.size() != size || signature.groups.size() != size || size == 0) {
    return InvalidArgument(
        "jaxmp: a process barrier needs a device, a process and a group for each position in the mesh, got ", size,
        ", ", signature.processes.size(), " and ", signature.groups.size());
  }
  signature.program_hash = Hash(signature.program);
  signature.digest = Hash(signature.call + "\n" + signature.fields);
  const std::string equal = signature.fields + "#" + std::to_string(signature.repeat);
  const std::string place = signature.program + "#" + std::to_string(signature.index);
  std::map<int64_t, std::string> keys;
  for (size_t position = 0; position < size; ++position) {
    const int64_t group = signature.groups[position];
    if (group < 0 || group >= static_cast<int64_t>(size) || signature.processes[position] < 0) {
      return InvalidArgument("jaxmp: groups and processes of a process barrier count from 0, got group ", group,
                             " and process ", signature.processes[position]);
    }
    if (static_cast<size_t>(group) >= signature.members.size()) signature.members.resize(size_t(group) + 1);
    CallSignature::Group& members = signature.members[static_cast<size_t>(group)];
    members.processes.push_back(static_cast<int>(signature.processes[position]));
    members.positions.push_back(static_cast<int64_t>(position));
    keys[group] += "," + std::to_string(signature.devices[position]);
  }
  for (auto& [group, devices] : keys) {
    CallSignature::Group& members = signature.members[static_cast<size_t>(group)];
    std::sort(members.processes.begin(), members.processes.end());
    members.processes.erase(std::unique(members.processes.begin(), members.processes.end()), members.processes.end());
    members.key = Hash(equal + ":" + devices);
    members.place = Hash(place + ":" + devices);
    members.circle = CircleOf(members.processes);
  }
  return std::shared_ptr<const CallSignature>(std::make_shared<CallSignature>(std::move(signature)));
}

uint64_t CircleOf(const std::vector<int>& processes) {
  return Hash(std::string(reinterpret_cast<const char*>(processes.data()), processes.size() * sizeof(int)));
}

std::string Differences(int one, const std::string& fields, int other, const std::string& other_fields) {
  const std::map<std::string, std::string> mine = FieldsOf(fields), theirs = FieldsOf(other_fields);
  std::string left, right;
  for (const auto& [name, value] : mine) {
    const auto found = theirs.find(name);
    if (found == theirs.end() || found->second == value) continue;
    left += " " + name + "=" + value;
    right += " " + name + "=" + found->second;
  }
  const std::string rank = "rank " + std::to_string(one), other_rank = "rank " + std::to_string(other);
  if (left.empty()) return rank + " and " + other_rank + " call it on other devices, or after other calls";
  return rank + " has" + left + ", " + other_rank + " has" + right;
}

}  // namespace jaxmp
