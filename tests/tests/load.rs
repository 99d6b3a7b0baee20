//! The verifier of the kernel at hand: every program of the object loads and can be attached, with everything optional
//! on and with everything off, since code behind a constant is verified only where the constant is set.

use std::{fs::File, time::Instant};

use anyhow::{Context, Result, bail};
use aya::{
    Ebpf,
    programs::{CgroupAttachMode, Program, ProgramError, TcAttachType, tc},
};
use sheave_agent::datapath::{
    Limits,
    programs::{
        features::Features,
        load::{self, Loaded, PacketSwitches, PodSign, Switches},
    },
    tables::pins::Pins,
};
use sheave_tests::{lab::Lab, node::Node};

/// What the verifier sees, by the names of the two extremes.
fn extremes() -> [(&'static str, Switches, Features); 2] {
    let all = Switches {
        host_only: true,
        loopback_node_ports: true,
        bind_protection: true,
        track_tcp: true,
        packets: PacketSwitches {
            masquerade_all: true,
            pods: PodSign::Device,
            cluster_ips_from_outside: false,
            keep_client: true,
            answer_pings: true,
            ..Default::default()
        },
    };
    let packets = PacketSwitches { pods: PodSign::Nothing, ..Default::default() };
    let nothing = Switches { packets, ..Default::default() };
    [("everything this kernel can", all, Features::probe(true)), ("nothing optional", nothing, Features::default())]
}

/// The object, and the same for devices without a link layer, of which only the packet programs are used. Its maps are
/// made and pinned in the node's bpffs; no program is loaded yet.
fn objects(node: &Node, switches: Switches, features: Features) -> Result<[(&'static str, Ebpf); 2]> {
    let pins = Pins::below(&node.paths().bpffs);
    let Loaded { ebpf, tunnels, .. } = load::load(&pins, &Limits::default(), switches, features)?;
    Ok([("", ebpf), (" without a link layer", tunnels)])
}

/// The end of a verifier's log is where it gave up.
fn shortened(error: &ProgramError) -> String {
    const LINES: usize = 40;
    let text = error.to_string();
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(LINES)..].join("\n")
}

fn load_one(program: &mut Program) -> Result<(), ProgramError> {
    match program {
        Program::CgroupSockAddr(program) => program.load(),
        Program::CgroupSock(program) => program.load(),
        Program::SchedClassifier(program) => program.load(),
        other => Err(ProgramError::IOError(std::io::Error::other(format!("no test loads a {:?}", other.prog_type())))),
    }
}

/// How much work the verifier had, of the million instructions that it allows; told since Linux 5.16.
fn verified(program: &Program) -> String {
    let count = program.info().ok().and_then(|info| info.verified_instruction_count());
    count.map_or("unknown".to_owned(), |count| count.to_string())
}

/// Attaches a program, loaded before, where the agent would: to the node's cgroup, or to its uplink in both directions.
fn attach_one(program: &mut Program, node: &Node) -> Result<()> {
    let cgroup = || File::open(&node.host.cgroup).with_context(|| node.host.cgroup.display().to_string());
    match program {
        Program::CgroupSockAddr(program) => {
            program.attach(cgroup()?, CgroupAttachMode::Single)?;
        }
        Program::CgroupSock(program) => {
            program.attach(cgroup()?, CgroupAttachMode::Single)?;
        }
        Program::SchedClassifier(program) => node.host.enter(|| {
            program.attach("eth0", TcAttachType::Ingress)?;
            program.attach("eth0", TcAttachType::Egress)?;
            anyhow::Ok(())
        })??,
        other => bail!("no test attaches a {:?}", other.prog_type()),
    }
    Ok(())
}

#[test]
fn every_program_loads_and_can_be_attached() -> Result<()> {
    for (extreme, switches, features) in extremes() {
        let Some(lab) = Lab::new(1)? else { return Ok(()) };
        let mut objects = objects(lab.n1(), switches, features)?;
        lab.n1().host.enter(|| tc::qdisc_add_clsact("eth0"))??; // before 6.6, where there is no tcx
        let (mut good, mut bad) = (0, Vec::new());
        // The second one with what is usual is loaded by every agent of the other tests.
        let objects = objects.iter_mut().filter(|(layer, _)| layer.is_empty() || features != Features::default());
        for (layer, ebpf) in objects {
            let wanted = |program: &Program| layer.is_empty() || matches!(program, Program::SchedClassifier(_));
            for (name, program) in ebpf.programs_mut().filter(|(_, program)| wanted(program)) {
                let start = Instant::now();
                let loaded = load_one(program);
                println!("{name}{layer}: {:?}, {} instructions verified", start.elapsed(), verified(program));
                match loaded {
                    Err(error) => bad.push(format!("── {name}{layer} does not load\n{}", shortened(&error))),
                    Ok(()) => match attach_one(program, lab.n1()) {
                        Err(error) => bad.push(format!("── {name}{layer} cannot be attached: {error:#}")),
                        Ok(()) => good += 1,
                    },
                }
            }
        }
        assert!(bad.is_empty(), "with {extreme}:\n{}", bad.join("\n"));
        assert!(good >= 15, "with {extreme}: the object holds only {good} programs");
    }
    Ok(())
}
